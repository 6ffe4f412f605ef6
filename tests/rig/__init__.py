"""hvdrun on several hosts (network namespaces, each with its sshd), and what can fail there."""
