"""Faster imports of the large libraries, because start-up time is part of every recovery.

peft and diffusers import bitsandbytes (0.8 s on a 2-core machine, and a line of output) even without an 8-bit
optimizer, and scipy (0.4 s) for losses and schedulers that FLUX does not use. Both are hidden during these imports: to
Python, None in sys.modules means "not installed". Later imports (`optimizers.py`) find them again. No module of the
project may import these libraries at module level.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

HIDDEN = ("bitsandbytes", "scipy")


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """In the block, `import name` fails as if the module were not installed, unless it is imported already."""
    mine = [name for name in names if name not in sys.modules]
    for name in mine:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in mine:
            del sys.modules[name]


def heavy() -> None:
    """Imports what every run needs: torch without cuDNN's attention, accelerate, diffusers' FLUX transformer, peft."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with hidden(*HIDDEN):
        import accelerate  # noqa: F401
        import diffusers.models.transformers.transformer_flux  # noqa: F401
        import peft  # noqa: F401
        import torch
        import transformers

    # On an H200, where it is the default, it made losses NaN (docs/measurements.md); like pytorch/pytorch#196678.
    torch.backends.cuda.enable_cudnn_sdp(False)
    transformers.utils.logging.disable_progress_bar()  # "Loading weights 36/36" is noise in a log


def everything() -> None:
    """Imports the libraries that a run needs from its start to its first step, for a process that waits at the gate."""
    heavy()
    with hidden(*HIDDEN):
        import diffusers.models.autoencoders.autoencoder_kl
        import diffusers.pipelines.flux.pipeline_flux  # noqa: F401
        import torch.utils.data  # noqa: F401
        import transformers.optimization  # noqa: F401
    import tqdm.auto  # noqa: F401
    from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5TokenizerFast  # noqa: F401
