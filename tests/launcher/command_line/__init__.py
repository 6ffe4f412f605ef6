"""launcher/command_line: options, the config file, the help page, --check-build."""
