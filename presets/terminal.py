"""What every command does with the terminal, or the pipe, that it prints to."""

import os
import sys
from collections.abc import Callable
from typing import Any


def command(main: Callable[[], int]) -> int:
    """The exit code of a command. Ctrl-C and `| head` end it quietly with 130; what Windows' pipes lack is escaped.

    A file that cannot be read or written, where the command does not say more, is named, with code 1.
    """
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code = main()
        sys.stdout.flush()
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(130)  # nothing is flushed again
    except OSError as error:
        if error.filename is None or isinstance(error, FileNotFoundError):
            raise  # a fault of ours, not of a disk
        print(f"error: {error}; check this disk or network drive, then try again", file=sys.stderr)
        return 1
    return code


def add_command(commands: Any, name: str, text: str) -> Any:
    """The parser of a subcommand, which its own --help explains too. commands: what `add_subparsers` returned."""
    return commands.add_parser(name, help=text, description=text)
