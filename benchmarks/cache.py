"""The folder for what is slow to make: `$HANGPROOF_CACHE` or the user's cache folder, outside the project.

Where neither can be written (a container without a home), it is below the folder for temporary files.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def folder(*parts: str) -> Path:
    """A folder of that name in the cache, created when it is missing."""
    given = os.environ.get("HANGPROOF_CACHE")
    base = Path(given or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "hangproof").expanduser()
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError:
        if given:
            raise
    if not given and not os.access(base, os.W_OK):
        base = Path(tempfile.gettempdir()) / f"hangproof-cache-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    path = base.joinpath(*parts)
    path.mkdir(parents=True, exist_ok=True)
    return path
