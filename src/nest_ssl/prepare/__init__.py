"""From audio to a measured manifest."""
