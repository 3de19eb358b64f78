"""What messages tell people to type, as their own shell reads it."""

from __future__ import annotations

import os
import shlex

START = r".\start.bat" if os.name == "nt" else "./start.sh"


def word(path: str | os.PathLike[str]) -> str:
    """A path as one word of a command. cmd knows no single quotes, and no Windows path has a double one."""
    return f'"{path}"' if os.name == "nt" else shlex.quote(str(path))
