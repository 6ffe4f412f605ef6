"""launcher/preflight: what hvdrun checks on all hosts before it starts a job."""
