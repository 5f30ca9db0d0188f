"""Data sources: audio files, tar shards, and lhotse's cuts."""
