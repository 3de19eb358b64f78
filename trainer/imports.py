"""Imports of the large libraries, made cheaper.

Start-up is part of every recovery. Importing peft or diffusers pulls in bitsandbytes (0.8 s on a 2-core machine, plus a
line of chatter) even when no 8-bit optimizer is used, and scipy (0.4 s) for losses and schedulers that FLUX has not.
Hiding them meanwhile is Python's own way: a None in sys.modules means "not installed". They are there again for whoever
imports them later (`optimizers.py`).
Nothing of ours may import these libraries at module level.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

HIDDEN = ("bitsandbytes", "scipy")


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """Within the block, `import name` fails as if it were not installed, unless it is imported already."""
    mine = [name for name in names if name not in sys.modules]
    for name in mine:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in mine:
            del sys.modules[name]


def heavy() -> None:
    """Imports torch, accelerate, diffusers' FLUX transformer and peft: what every run needs."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with hidden(*HIDDEN):
        import accelerate  # noqa: F401
        import diffusers.models.transformers.transformer_flux  # noqa: F401
        import peft  # noqa: F401
        import torch  # noqa: F401
        import transformers

    transformers.utils.logging.disable_progress_bar()  # "Loading weights 36/36" says nothing in a log
