"""Frozen weights that visit the device: of groups of modules, only those in use are there.

Two ways use it. `--split_mode` has two groups, the halves of a FLUX transformer, of which only the lower one is
trained: one half is on the device at a time. `--blocks_to_stream N` has a group for each of the last N blocks; while a
block computes, the next one is copied. Frozen weights do not change, so they are only ever copied to the device: their
home in main memory stays. LoRA weights and gradients are always on the device, so nothing moves for the optimizer.

To a GPU the copies are asynchronous, from pinned memory on a stream of their own. The computing stream waits for the
event behind a copy, and the processor waits only where a half leaves before the other comes: there is no thread and no
future that could hang (sd-scripts' --blocks_to_swap has both). On an H200 streamed blocks of the tiny model give the
loss of blocks that stay; split mode at full size is measured in docs/measurements.md. **Not measured**: whether the
copies of streamed blocks overlap with the computation at full size.

A module's weights come when its forward begins, also when gradient checkpointing runs it again in backward; its own
backward follows at once, before another group comes. Without checkpointing, backward would miss them.
"""

import torch
from torch import nn


class Streamer:
    """Brings groups of modules to `device`. ahead: the next is copied while one computes; else the old goes first."""

    def __init__(self, groups: list[list[nn.Module]], device: torch.device, ahead: bool) -> None:
        self.device, self.ahead = device, ahead
        self.parts = [[p for module in group for p in module.parameters() if not p.requires_grad] for group in groups]
        self.home = [[self.at_home(p.data) for p in parts] for parts in self.parts]
        self.present: dict[int, torch.cuda.Event | None] = {}  # group → the event behind its copy
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        for number, group in enumerate(groups):
            self.drop(number)
            for module in group:
                module.register_forward_pre_hook(lambda module, args, number=number: self.enter(number))

    def at_home(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight on the CPU, pinned for a CUDA device so that its copies need not wait."""
        kept = weight.to("cpu")
        return kept.pin_memory() if self.device.type == "cuda" else kept

    def enter(self, number: int) -> None:
        """Group `number` is about to compute: it is on the device, others go. Can be called again after a failure."""
        backward = torch._C._current_graph_task_id() != -1
        following = number + (-1 if backward else 1)
        wanted = {number, following} if self.ahead and 0 <= following < len(self.parts) else {number}
        for other in self.present.keys() - wanted:
            self.drop(other)
            if (
                self.stream is not None and not self.ahead
            ):  # else both halves would be in memory while the first still computes
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
        for one in sorted(wanted, key=lambda one: one != number):
            if one not in self.present:
                self.bring(one)
        if event := self.present[number]:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(event)
            for p in self.parts[number]:
                p.data.record_stream(now)

    def bring(self, number: int) -> None:
        """Copy a group to the device; to a GPU the copy is only on its way when this returns."""
        event = None
        with torch.cuda.stream(self.stream):  # None: no other stream
            for p, home in zip(self.parts[number], self.home[number], strict=True):
                p.data = home.to(self.device, non_blocking=True)
            if self.stream is not None:
                event = torch.cuda.Event()
                event.record(self.stream)
        self.present[number] = event

    def drop(self, number: int) -> None:
        """Remove a group from the device."""
        self.present.pop(number, None)
        for p, home in zip(self.parts[number], self.home[number], strict=True):
            p.data = home


def split(model: nn.Module, lower: tuple[str, ...], device: torch.device) -> Streamer:
    """The halves of a transformer, one on the device at a time. lower: the names of the lower half's modules."""
    halves: list[list[nn.Module]] = [[], []]
    for name, module in model.named_children():
        halves[name in lower] += module if isinstance(module, nn.ModuleList) else [module]
    return install(model, halves, device, ahead=False)


def blocks(model: nn.Module, count: int, device: torch.device) -> Streamer:
    """The last `count` blocks of a transformer visit the device one after the other; the rest stays there."""
    kinds = set(model._no_split_modules or ())
    found = [[module] for module in model.modules() if type(module).__name__ in kinds]
    return install(model, found[-count:], device, ahead=True)


def install(model: nn.Module, groups: list[list[nn.Module]], device: torch.device, ahead: bool) -> Streamer:
    """The weights of the groups visit the device; everything else is moved there."""
    streamer = Streamer(groups, device, ahead)
    visiting = {id(p) for parts in streamer.parts for p in parts}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in visiting:
            tensor.data = tensor.data.to(device)
    return streamer
