"""The data as training will see it."""
