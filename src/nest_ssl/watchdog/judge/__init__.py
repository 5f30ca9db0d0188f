"""Which rank is to blame, and how long a stage may last."""
