"""launcher/output: the ranks' output, line by line, on terminals and in files."""
