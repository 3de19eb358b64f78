"""`--split_mode` as it was designed: the two halves of FLUX are on the device in turn, and no thread is involved.

The double blocks (and what feeds them) run under no_grad, then leave the device; the single blocks and the final layer
are moved in and train. It trains a LoRA of the single blocks only, with about 55 % of the parameter memory. sd-scripts
removed it in November 2024 and now turns the flag into `--blocks_to_swap 18`, whose pool threads are FluxGym's
best-known hang.

Why hooks around Flux's own forward and not two models as before: the arithmetic stays sd-scripts' own, in its order, so
the result equals plain training in every digit, and new keyword arguments (ControlNet, masks) pass through. Before the
forward, the first half is moved in and gradients are switched off; before the first single block the halves change
places and gradients are switched on again.

Frozen weights never change, so they never need to be copied back: the copies on the device are dropped and the host
tensors are put back. That is one upload per turn instead of an upload and a download. When the device is the CPU there
is nothing to move, and no tensor is replaced.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable, Iterable
from typing import Any

from sd_scripts_patches.patch import Patch, Target, around, find_function, function, uses

MODULE = "flux_train_network"
MODELS = "library.flux_models"
SECOND_HALF = ("single_blocks", "final_layer")
"""The children that train. All others run before them."""
logger = logging.getLogger(__name__)


class SplitModeError(ValueError):
    """`--split_mode` with arguments or a model that it does not support; the message names each and what to do."""


def conflicts(args: Any) -> list[str]:
    """Return why --split_mode does not support these arguments, one line per flag; [] when it does."""
    network = dict(pair.split("=", 1) for pair in args.network_args or [] if "=" in pair)
    found = []
    if args.blocks_to_swap:
        found.append("--blocks_to_swap: moves single blocks, split_mode moves halves; use only one of the two")
    if args.cpu_offload_checkpointing:
        found.append("--cpu_offload_checkpointing: remove it; --gradient_checkpointing alone works")
    if network.get("train_blocks") != "single":
        given = f"train_blocks={network['train_blocks']}" if "train_blocks" in network else "no train_blocks"
        found.append(f"{given} in --network_args: split_mode trains the single blocks only; add train_blocks=single")
    if "in_dims" in network:
        found.append("in_dims in --network_args: those layers are in the half that runs without gradients; remove it")
    if not args.network_train_unet_only:
        found.append("the text encoders get no gradient: add --network_train_unet_only")
    if args.model_type == "chroma":
        found.append("--model_type chroma: computes its modulation outside the model's forward; use flux")
    for flag in ("deepspeed", "torch_compile"):
        if getattr(args, flag, False):
            found.append(f"--{flag}: splits the model itself; remove it")
    return found


class Halves:
    """The two halves of a model. One at a time has its parameters on `device`.

    peak_bytes: the most that was on the device at once; total_bytes: the size of the complete model.
    """

    def __init__(self, model: Any, device: Any) -> None:
        self.device = device
        first = _tensors(child for name, child in model.named_children() if name not in SECOND_HALF)
        second = _tensors(child for name, child in model.named_children() if name in SECOND_HALF)
        self.tensors = {"first": first, "second": second}
        if set(map(id, _tensors([model]))) != {*map(id, first), *map(id, second)} or not first or not second:
            raise SplitModeError(
                f"split_mode: {type(model).__name__} cannot be split into halves at {', '.join(SECOND_HALF)}"
            )
        self.host = {half: [t.data for t in tensors] for half, tensors in self.tensors.items()}
        self.bytes = {half: sum(t.nbytes for t in host) for half, host in self.host.items()}
        self.total_bytes = sum(self.bytes.values())
        self.peak_bytes = 0
        self.present: str | None = None

    def move_in(self, half: str) -> None:
        """Move `half` to the device and the other half away from it."""
        if half == self.present:
            return
        if self.device.type != "cpu":
            self.present, other = None, "second" if half == "first" else "first"
            for tensor, host in zip(self.tensors[other], self.host[other], strict=True):
                tensor.data = host
            _empty_cache(self.device)
            for tensor, host in zip(self.tensors[half], self.host[half], strict=True):
                tensor.data = _upload(host, self.device)
        self.present = half
        self.peak_bytes = max(self.peak_bytes, self.bytes[half])


def split(model: Any, device: Any) -> Halves:
    """From now on, every forward moves the halves of a Flux (on the CPU now) to `device` in turn."""
    import torch

    adapted = [
        name
        for name, m in model.named_modules()
        if "forward" in vars(m) and name and name.split(".")[0] not in SECOND_HALF
    ]
    if adapted:
        raise SplitModeError(
            f"split_mode: {len(adapted)} layers of the half that runs without gradients are adapted (the first is "
            f"{adapted[0]}); train a LoRA of the single blocks only (--network_args train_blocks=single)"
        )
    halves = Halves(model, device)
    grad_enabled: list[bool] = []
    logged: list[bool] = []

    def before(module: Any, args: Any) -> None:
        grad_enabled.append(torch.is_grad_enabled())
        halves.move_in("first")
        torch.set_grad_enabled(False)

    def between(module: Any, args: Any) -> None:
        halves.move_in("second")
        torch.set_grad_enabled(grad_enabled[-1])

    def after(module: Any, args: Any, output: Any) -> None:
        torch.set_grad_enabled(grad_enabled.pop())
        if not logged:
            logged.append(True)
            logger.info(
                f"split_mode: peak of parameters on {device}: {halves.peak_bytes} of {halves.total_bytes} bytes "
                f"({halves.peak_bytes / halves.total_bytes:.1%})"
            )

    model.register_forward_pre_hook(before)
    model.single_blocks[0].register_forward_pre_hook(between)
    model.register_forward_hook(after, always_call=True)
    model.hangproof_halves = halves
    logger.info(f"split_mode: double blocks and single blocks are on {device} in turn")
    return halves


def _device_of_inputs(original: property) -> property:
    """The device of a split model is that of its inputs, wherever its first parameter is."""
    getter = original.fget
    assert getter is not None

    def device(self: Any) -> Any:
        halves = vars(self).get("hangproof_halves")
        return halves.device if halves is not None else getter(self)

    return property(device)


@around
def _assert_extra_args(original: Callable, self: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Refuse conflicting arguments, and keep sd-scripts from swapping blocks instead."""
    if not args.split_mode:
        return original(self, args, *rest, **kwargs)
    found = conflicts(args)
    if found:
        raise SplitModeError("--split_mode does not support these arguments:\n  " + "\n  ".join(found))
    args.split_mode = False  # sd-scripts sets blocks_to_swap when it is set
    try:
        return original(self, args, *rest, **kwargs)
    finally:
        args.split_mode = True


@around
def _prepare(original: Callable, self: Any, args: Any, accelerator: Any, unet: Any) -> Any:
    """Split the model when it is prepared."""
    if not args.split_mode:
        return original(self, args, accelerator, unet)
    if self.is_swapping_blocks:
        raise SplitModeError("--split_mode: block swap is active as well; remove --blocks_to_swap")
    unet.to("cpu")
    prepared = accelerator.prepare(unet, device_placement=[False])
    split(accelerator.unwrap_model(prepared), accelerator.device)
    return prepared


def _upload(host: Any, device: Any) -> Any:
    """Return the copy of a tensor on the device."""
    return host.to(device)


def _tensors(modules: Iterable[Any]) -> list:
    """Return parameters and buffers, each once."""
    found: dict[int, object] = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            found[id(tensor)] = tensor
    return list(found.values())


def _empty_cache(device: Any) -> None:
    """Return the dropped tensors to the device: the halves' tensors differ in size, so the cached blocks do not fit."""
    import torch

    backend = getattr(torch, device.type, None)
    if backend is not None and hasattr(backend, "empty_cache"):
        backend.empty_cache()


def _halves_in_order(tree: ast.Module) -> str | None:
    """Return None when the forward runs everything else before the single blocks and ends with the final layer."""
    forward = ast.unparse(find_function(tree, "Flux.forward"))
    last = {name: forward.rfind(f"self.{name}") for name in ("double_blocks", *SECOND_HALF)}
    if -1 in last.values():
        return f"Flux.forward does not use {', '.join(n for n, at in last.items() if at < 0)}"
    order = [*(forward.find(f"self.{name}_blocks") for name in ("double", "single")), *list(last.values())[1:]]
    if order != sorted(order):
        return "Flux.forward does not run double blocks, single blocks and final layer in this order"
    return None


PATCH = Patch(
    name="split_mode",
    why="--split_mode is turned into --blocks_to_swap 18, which hangs",
    targets=(
        function(MODULE, "FluxNetworkTrainer.assert_extra_args(self, args)", _assert_extra_args),
        function(MODULE, "FluxNetworkTrainer.prepare_unet_with_accelerator(self, args, accelerator, unet)", _prepare),
        Target(MODELS, "Flux.device", make=_device_of_inputs),
        function(MODELS, "Flux.forward(self, img)", check=_halves_in_order),
    ),
    relevant=uses("--split_mode"),
)
