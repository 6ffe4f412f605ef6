"""launcher/agent: what runs on each host of a job."""
