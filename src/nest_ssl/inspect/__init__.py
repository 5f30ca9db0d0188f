"""What data looks like to training."""
