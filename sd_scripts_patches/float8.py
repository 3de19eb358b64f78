"""`--fp8_base` casts the model to float8 on the CPU at each start. Here it is cast once, and later a copy is read.

sd-scripts says itself that the cast may take a while, and advises a float8 file. This makes that file, which
guards/quantized.py keeps beside the model. The cast is the trainer's own (`model.to`), so the weights are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from guards import world
from guards.file_contents import tensor_damage
from guards.quantized import Copy
from sd_scripts_patches.patch import Patch, around, function, uses

RECIPE = "sd-scripts, all of the model"
CAST = ("torch.bfloat16", "torch.float16", "torch.float32")  # what sd-scripts casts; float8 files it takes as they are


@around
def _load_flow_model(original: Callable, ckpt_path: str, dtype: Any, device: Any, *rest: Any, **kwargs: Any) -> Any:
    """Read the copy, or make it. Only where the type is left open: that is what --fp8_base does."""
    if dtype is not None or not Path(ckpt_path).is_file():
        return original(ckpt_path, dtype, device, *rest, **kwargs)
    path = Path(ckpt_path)
    copy = Copy(path.parent, [path], RECIPE)
    if copy.path.exists():
        found = None if tensor_damage(copy.path) else original(str(copy.path), dtype, device, *rest, **kwargs)
        if found and not any(tensor.is_meta for tensor in found[1].state_dict().values()):
            return found
        print(f"the copy of the weights in float8 is incomplete and is made again: {copy.path}", flush=True)
        copy.path.unlink()
    found = original(ckpt_path, dtype, device, *rest, **kwargs)
    if str(found[1].dtype) in CAST:
        _cast(found[1], copy)
    return found


def _cast(model: Any, copy: Copy) -> None:
    """What the trainer does next, and the copy of it."""
    import torch

    model.to(torch.float8_e4m3fn)
    if world.rank():
        return
    for name, tensor in model.state_dict().items():
        copy.add(name, tensor)
    copy.finish()


PATCH = Patch(
    name="float8",
    why="--fp8_base casts the whole model on the CPU at each start",
    targets=(
        function(
            "library.flux_utils",
            "load_flow_model(ckpt_path, dtype, device, disable_mmap)",
            _load_flow_model,
            optional=True,
        ),
    ),
    relevant=uses("--fp8_base", "--fp8_base_unet"),
)
