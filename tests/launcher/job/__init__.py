"""launcher/job: what hvdrun decides as a job goes on, and how it went."""
