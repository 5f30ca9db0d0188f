"""The report of a pre-training run."""
