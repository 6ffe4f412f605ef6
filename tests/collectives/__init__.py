"""hvdlite.collectives and the public functions: arguments, results, errors, joins, threads."""
