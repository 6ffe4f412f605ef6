"""launcher/running: jobs that run, for real."""
