"""What every command does with the terminal, or the pipe, that it prints to."""

import os
import re
import sys
from collections.abc import Callable
from typing import Any, TextIO

# Control characters and those that turn the direction of writing. A file name from elsewhere that is printed as it is
# could fill the clipboard, hide lines or rename the window. Colours stay: Python's own messages have them.
CONTROL = re.compile("(\x1b\\[[0-9;]*m)|\r(?!\n)|[\0-\b\v\f\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """`text` with each control character as its number; JSON stays JSON."""
    return CONTROL.sub(lambda found: found[1] or f"\\u{ord(found[0]):04x}", text)


class _Plain:
    """A stream that writes text as `plain` gives it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(plain(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def command(main: Callable[[], int]) -> int:
    """The exit code of a command. Ctrl-C and `| head` end it quietly with 130; what Windows' pipes lack is escaped.

    A file that cannot be read or written, where the command does not say more, is named, with code 1.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.stdout, sys.stderr = map(_Plain, streams)
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
    finally:
        sys.stdout, sys.stderr = streams
    return code


def add_command(commands: Any, name: str, text: str) -> Any:
    """The parser of a subcommand, which its own --help explains too. commands: what `add_subparsers` returned."""
    return commands.add_parser(name, help=text, description=text)
