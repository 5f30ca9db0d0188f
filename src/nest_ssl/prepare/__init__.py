"""From audio to a measured manifest and tar shards."""
