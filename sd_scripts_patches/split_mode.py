"""`--split_mode` as it was meant: the two halves of FLUX take turns on the device, whole, with no thread.

The double blocks (and what feeds them) run under no_grad, then step aside; the single blocks and the final layer come
and train. It trains a LoRA of the single blocks only, in about 55 % of the parameter memory. sd-scripts dropped it in
November 2024 and has since turned the flag into `--blocks_to_swap 18`, whose pool threads are FluxGym's best-known hang.

Why hooks around Flux's own forward and not two models as it once was: the arithmetic stays sd-scripts' own, in its order,
so the result is that of plain training to the digit, and keywords it gains (ControlNet, masks) pass through. Before
the forward the first half comes in and gradients are switched off; before the first single block the halves
change places and they are switched on again.

Frozen weights never change, so they never have to come back from the device: their copies there are dropped and the
ones in memory are put back in place. One upload a turn instead of an upload and a download, and on a machine whose
device is the CPU, where there is nothing to move, no tensor is ever replaced.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from sd_scripts_patches.patch import Patch, Target, find_function, wrap

MODULE = "flux_train_network"
MODELS = "library.flux_models"
LATER = ("single_blocks", "final_layer")
"""What trains. All else runs before it."""
logger = logging.getLogger(__name__)


class SplitModeError(ValueError):
    """`--split_mode` together with what it cannot work with; the message names each flag and what to do."""


def refusals(args: Any) -> list[str]:
    """Why these arguments cannot go with --split_mode, one line a flag; [] where they can."""
    network = dict(pair.split("=", 1) for pair in args.network_args or [] if "=" in pair)
    found = []
    if args.blocks_to_swap:
        found.append("--blocks_to_swap moves blocks by threads, split_mode moves halves: give one of the two")
    if args.cpu_offload_checkpointing:
        found.append("--cpu_offload_checkpointing: leave it out; --gradient_checkpointing alone works")
    if network.get("train_blocks") != "single":
        given = f"train_blocks={network['train_blocks']}" if "train_blocks" in network else "no train_blocks"
        found.append(f"{given} in --network_args: only the single blocks are trained; add train_blocks=single")
    if "in_dims" in network:
        found.append(
            "in_dims in --network_args: those layers are in the half that runs without gradients; leave it out"
        )
    if not args.network_train_unet_only:
        found.append("the text encoders would get no gradient: add --network_train_unet_only")
    if args.model_type == "chroma":
        found.append("--model_type chroma: its modulation is computed outside the model's forward; use flux")
    for flag in ("deepspeed", "torch_compile"):
        if getattr(args, flag, False):
            found.append(f"--{flag}: takes the model apart by itself; leave it out")
    return found


class Halves:
    """The two halves of a model, of which one at a time has its parameters on `device`.

    names: children of `model` that belong to the second half. upload: home tensor → its copy on the device.
    peak_bytes: the most that was there at once; whole_bytes: what the whole model would take.
    """

    def __init__(
        self,
        model: Any,
        device: Any,
        names: tuple[str, ...] = LATER,
        upload: Callable[[Any], Any] | None = None,
    ) -> None:
        self.device = device
        self.upload = upload or (lambda home: home.to(device))
        first = _tensors(child for name, child in model.named_children() if name not in names)
        second = _tensors(child for name, child in model.named_children() if name in names)
        self.tensors = {"first": first, "second": second}
        if set(map(id, _tensors([model]))) != {*map(id, first), *map(id, second)} or not first or not second:
            raise SplitModeError(f"split_mode: {type(model).__name__} does not come apart at {', '.join(names)}")
        self.home = {half: [t.data for t in tensors] for half, tensors in self.tensors.items()}
        self.bytes = {half: sum(t.nbytes for t in home) for half, home in self.home.items()}
        self.whole_bytes = sum(self.bytes.values())
        self.peak_bytes = 0
        self.present: str | None = None

    def bring(self, half: str) -> None:
        """Have `half` on the device, and the other one not. Returns when it is there."""
        if half == self.present:
            return
        if self.device.type != "cpu":
            self.present, other = None, "second" if half == "first" else "first"
            for tensor, home in zip(self.tensors[other], self.home[other], strict=True):
                tensor.data = home
            _empty_cache(self.device)
            for tensor, home in zip(self.tensors[half], self.home[half], strict=True):
                tensor.data = self.upload(home)
        self.present = half
        self.peak_bytes = max(self.peak_bytes, self.on_device())

    def on_device(self) -> int:
        """Bytes of parameters on the device now; where that is the CPU, of the half whose turn it is."""
        if self.device.type == "cpu":
            return self.bytes[self.present] if self.present else 0
        pairs = [
            (t, home) for half in self.tensors for t, home in zip(self.tensors[half], self.home[half], strict=True)
        ]
        return sum(t.nbytes for t, home in pairs if t.data_ptr() != home.data_ptr())


def split(model: Any, device: Any) -> Halves:
    """Let the halves of a Flux, on the CPU now, take turns on `device` in every forward from here on."""
    import torch

    adapted = [
        name for name, m in model.named_modules() if "forward" in vars(m) and name and name.split(".")[0] not in LATER
    ]
    if adapted:
        raise SplitModeError(
            f"split_mode: {len(adapted)} layers of the half that runs without gradients are to be trained ({adapted[0]} first): "
            "a LoRA of the single blocks only is needed (--network_args train_blocks=single)"
        )
    halves = Halves(model, device)
    grad_enabled: list[bool] = []
    told: list[bool] = []

    def before(module, args):
        grad_enabled.append(torch.is_grad_enabled())
        halves.bring("first")
        torch.set_grad_enabled(False)

    def between(module, args):
        halves.bring("second")
        torch.set_grad_enabled(grad_enabled[-1])

    def after(module, args, output):
        torch.set_grad_enabled(grad_enabled.pop())
        if not told:
            told.append(True)
            logger.info(
                f"split_mode: parameters on {device} at once: {halves.peak_bytes} of {halves.whole_bytes} bytes "
                f"({halves.peak_bytes / halves.whole_bytes:.1%})"
            )

    model.register_forward_pre_hook(before)
    model.single_blocks[0].register_forward_pre_hook(between)
    model.register_forward_hook(after, always_call=True)
    model.hangproof_halves = halves
    logger.info(f"split_mode: double blocks and single blocks take turns on {device}")
    return halves


def apply(module: ModuleType) -> None:
    """Refuse what cannot go together, keep sd-scripts from swapping blocks instead, split where the model is prepared."""
    wrap(module, "FluxNetworkTrainer.assert_extra_args", _assert_extra_args)
    wrap(module, "FluxNetworkTrainer.prepare_unet_with_accelerator", _prepare)


def apply_to_models(module: ModuleType) -> None:
    """A split model is where its inputs must be, wherever its first parameter is."""
    original = vars(module.Flux)["device"].fget

    def device(self):
        halves = vars(self).get("hangproof_halves")
        return halves.device if halves is not None else original(self)

    module.Flux.device = property(device)


def _assert_extra_args(original: Callable) -> Callable:
    def assert_extra_args(self, args, *rest, **kwargs):
        if not args.split_mode:
            return original(self, args, *rest, **kwargs)
        wrong = refusals(args)
        if wrong:
            raise SplitModeError("--split_mode cannot go with these arguments:\n  " + "\n  ".join(wrong))
        args.split_mode = False  # it would set blocks_to_swap
        try:
            return original(self, args, *rest, **kwargs)
        finally:
            args.split_mode = True

    return assert_extra_args


def _prepare(original: Callable) -> Callable:
    def prepare_unet_with_accelerator(self, args, accelerator, unet):
        if not args.split_mode:
            return original(self, args, accelerator, unet)
        if self.is_swapping_blocks:
            raise SplitModeError("--split_mode: blocks are being swapped all the same; leave --blocks_to_swap out")
        unet.to("cpu")
        prepared = accelerator.prepare(unet, device_placement=[False])
        split(accelerator.unwrap_model(prepared), accelerator.device)
        return prepared

    return prepare_unet_with_accelerator


def _tensors(modules: Iterable[Any]) -> list:
    """Parameters and buffers, each once."""
    found: dict[int, object] = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            found[id(tensor)] = tensor
    return list(found.values())


def _empty_cache(device: Any) -> None:
    """Give what was dropped back to the device: the halves' tensors differ in size, and pieces do not add up."""
    import torch

    backend = getattr(torch, device.type, None)
    if hasattr(backend, "empty_cache"):
        backend.empty_cache()


def _halves_in_order(tree: ast.Module) -> str | None:
    """The forward must be done with everything else before it comes to the single blocks, and end with the final layer."""
    forward = ast.unparse(find_function(tree, "Flux.forward"))
    last = {name: forward.rfind(f"self.{name}") for name in ("double_blocks", *LATER)}
    if -1 in last.values():
        return f"Flux.forward no longer uses {', '.join(n for n, at in last.items() if at < 0)}"
    if (
        not forward.find("self.double_blocks")
        < forward.find("self.single_blocks")
        < last["single_blocks"]
        < last["final_layer"]
    ):
        return "Flux.forward no longer runs double blocks, single blocks, final layer in this order"
    return None


PATCH = Patch(
    name="split_mode",
    why="--split_mode is turned into --blocks_to_swap 18, which hangs",
    targets=(
        Target(MODULE, "FluxNetworkTrainer.assert_extra_args", params=("self", "args")),
        Target(
            MODULE, "FluxNetworkTrainer.prepare_unet_with_accelerator", params=("self", "args", "accelerator", "unet")
        ),
        Target(MODELS, "Flux.device"),
        Target(MODELS, "Flux.forward", params=("self", "img"), check=_halves_in_order),
    ),
    apply={MODULE: apply, MODELS: apply_to_models},
)
