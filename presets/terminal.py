"""What every command does with the terminal, or the pipe, that it prints to."""

import os
import sys
from collections.abc import Callable


def command(main: Callable[[], int]) -> int:
    """The exit code of a command. Ctrl-C and `| head` end it quietly with 130; what Windows' pipes lack is escaped."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code = main()
        sys.stdout.flush()
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(130)  # nothing is flushed again
    return code
