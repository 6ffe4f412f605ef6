"""Builds the documentation site from docs/*.md, the docstrings and the launcher's tables.

The pages are Markdown that reads well on a code host too. Where the site shows more, a page has a
comment: `<!-- table: variables -->` stands for a generated table, and `<!-- docstrings -->` for the
docstrings of the names in the table above it. What stands between `<!-- table: … -->` or
`<!-- not in the site -->` and `<!-- end -->` is for readers of the plain file.
"""
