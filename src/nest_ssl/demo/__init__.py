"""The demo's data: synthetic speech and noise."""
