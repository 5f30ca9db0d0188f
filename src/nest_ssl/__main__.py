"""`python -m nest_ssl` is `nest-ssl`: both start here, where nothing slow is imported yet."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
"""What shells report for a program that SIGINT has ended."""


def main() -> None:
    """Run the command. Ctrl-C ends it without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell has it ignored in the background
        signal.signal(signal.SIGINT, _on_interrupt)
    try:
        from nest_ssl.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except ImportError as error:
        if "failed to map segment" not in str(error):
            raise
        sys.exit(
            f"nest-ssl: {error}: too little memory to load it. Is it limited ('ulimit -v' prints the limit in kB)?"
        )


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """End at once during an import, where torch's C++ code aborts on an exception."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
