"""Making batches: reading, noise, augmentation, padding, and the loader that yields them."""
