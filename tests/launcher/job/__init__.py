"""launcher/job: a running job, how it ends, and what the user reads about it."""
