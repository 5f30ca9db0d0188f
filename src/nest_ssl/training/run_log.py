"""What a rank says, in a file of its own in the run folder."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from nest_ssl.config import ExperimentConfig


@contextlib.contextmanager
def log_to_file(folder: Path, exp: ExperimentConfig, *, global_rank: int, local_rank: int) -> Iterator[None]:
    """Meanwhile, this rank's log also goes to `log_globalrank-R_localrank-L.txt`, if `exp` wants one of this rank."""
    if (exp.log_global_rank_0_only and global_rank != 0) or (exp.log_local_rank_0_only and local_rank != 0):
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / f"log_globalrank-{global_rank}_localrank-{local_rank}.txt")
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {global_rank} %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    except Exception:
        logging.getLogger(__name__).debug("the run ends with an error", exc_info=True)
        raise
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
