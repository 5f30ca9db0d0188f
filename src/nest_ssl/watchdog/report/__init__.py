"""What the watchdog writes to the run folder: evidence, incidents, status."""
