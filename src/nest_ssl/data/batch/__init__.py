"""Making batches: reading, noise, augmentation, padding, and the loader that hands them out."""
