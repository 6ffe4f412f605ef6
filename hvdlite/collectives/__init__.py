"""The collectives, one file for each with all its forms; `hvdlite` lists their public names.

`calls` has what the forms share, with `posting` (turns arguments into what the engine takes),
`groups`, `devices` (where the tensors are) and `handles` (waiting). A blocking form drives the
engine itself and so leaves the progress thread asleep (`wake=False`).
"""
