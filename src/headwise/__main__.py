"""`python -m headwise` and the `headwise` command: the first lines of the process."""

import os
import sys

# built in: `signal` imports five modules before a handler can be set
from _signal import SIGINT, default_int_handler, getsignal, signal  # pyright: ignore[reportMissingImports]


def start() -> int:
    """The exit code of the command; Ctrl-C before `main` has its own handlers ends the process with a sentence."""
    if getsignal(SIGINT) is default_int_handler:
        signal(SIGINT, _end)
    from headwise.cli.main import main

    return main()


def _end(number: int, frame: object) -> None:
    """Nothing has been written yet, and an exception could be lost in an import."""
    os.write(2, b"headwise: interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(start())
