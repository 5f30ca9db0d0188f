"""Reading and writing models."""

from nest_ssl.checkpoint.load import fill, load
from nest_ssl.nemo_file import CheckpointError, read_nemo, write_nemo

__all__ = ["CheckpointError", "fill", "load", "read_nemo", "write_nemo"]
