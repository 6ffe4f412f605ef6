"""launcher/reports: what the user reads about a job that waits, lacks something or has failed."""
