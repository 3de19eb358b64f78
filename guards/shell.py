"""What a message tells a person to type, as their own shell reads it."""

import os
import shlex


def word(path: str | os.PathLike[str]) -> str:
    """A path as one word of a command. cmd knows no single quotes, and no Windows path has a double one."""
    return f'"{path}"' if os.name == "nt" else shlex.quote(str(path))
