"""The batch plan: the order of an epoch, cut into batches for all ranks."""
