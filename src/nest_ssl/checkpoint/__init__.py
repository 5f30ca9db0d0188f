"""Reading and writing models."""

from nest_ssl.checkpoint.read import load
from nest_ssl.nemo_file import CheckpointError, read_nemo, write_nemo

__all__ = ["CheckpointError", "load", "read_nemo", "write_nemo"]
