"""The beacon, the monitor, and what they say of a rank that stalls."""
