"""Captions by Florence-2, in sentences of three lengths, with transformers' own classes.

The checkpoints are those converted for transformers (florence-community/…): the first ones, microsoft/…, run code from
their repository (`trust_remote_code`), which broke with new versions of transformers
(github.com/cocktailpeanut/fluxgym/issues/464).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from runs.files import RunError

TASKS = {  # the task's word, and the most new tokens
    "short": ("<CAPTION>", 64),
    "detailed": ("<DETAILED_CAPTION>", 256),
    "long": ("<MORE_DETAILED_CAPTION>", 512),
}
BEAMS = 3  # as in the model's card


def load(folder: Path, task: str, gpu_gb: float = 0.0) -> Callable[[Any], str]:
    """A function from an image (PIL, RGB) to its caption. Raises RunError: the files are not those of a Florence-2
    model.

    Args:
        task: a key of TASKS. gpu_gb: free GPU memory that the model needs, else it runs on the processor.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoProcessor, Florence2ForConditionalGeneration

    device = "cuda" if gpu_is_free(gpu_gb) else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    try:
        # No code of a repository runs, and nothing is downloaded here.
        processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = Florence2ForConditionalGeneration.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RunError(
            f"{folder} cannot be loaded as Florence-2 ({reason}); use a model for transformers' own class, such as "
            "florence-community/Florence-2-base"
        ) from error
    try:
        model = model.eval().to(device)
    except torch.OutOfMemoryError as error:
        raise RunError("The GPU has too little free memory for this model; end what uses it, or try again") from error
    word, tokens = TASKS[task]

    def caption(image: Any) -> str:
        inputs = processor(text=word, images=image, return_tensors="pt").to(device, dtype)
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=tokens, num_beams=BEAMS, do_sample=False)
        return str(processor.batch_decode(ids, skip_special_tokens=True)[0])

    return caption


def gpu_is_free(needed_gb: float) -> bool:
    """Whether a GPU has this much memory free: a training on the same GPU must not run out of memory."""
    import torch

    if not torch.cuda.is_available():
        return False
    return bool(torch.cuda.mem_get_info()[0] >= needed_gb * 1e9)
