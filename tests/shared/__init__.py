"""Parameters and data that the ranks of a host have in common."""
