"""The snapshots of a run as plain values, for the page and the API.

They are made again only after a file changed, and of `metrics.jsonl` only what was added is read.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from runs.evolution import Evolution, Lora, Losses, Sample, Snapshot, best, read_prompts, read_samples, table
from ui.dataset.images import file_url
from ui.run import blind_vote, view
from ui.run.readers import Stamp, stamp

KEPT = 8  # runs whose losses stay in memory
FILES = ("sample", "sample_prompts.txt", "metrics.jsonl", blind_vote.FILE)


class _Run:
    """What is kept of a run between two requests."""

    def __init__(self, folder: Path):
        self.lock = threading.Lock()
        self.losses = Losses(folder / "metrics.jsonl")
        self.stamps: tuple[Any, ...] = ()
        self.found = Evolution()
        self.answer: dict[str, Any] = {}


_runs: OrderedDict[Path, _Run] = OrderedDict()
_lock = threading.Lock()


def _run(folder: Path) -> _Run:
    with _lock:
        one = _runs.pop(folder, None) or _Run(folder)
        _runs[folder] = one
        while len(_runs) > KEPT:
            _runs.popitem(last=False)
        return one


def _stamps(folder: Path, loras: Sequence[Lora]) -> tuple[Stamp | tuple[Lora, ...], ...]:
    return (*(stamp(folder / name) for name in FILES), tuple(loras))


def _read(folder: Path) -> tuple[Evolution, dict[str, Any]]:
    one, loras = _run(folder), view.loras(folder)
    with one.lock:
        now = _stamps(folder, loras)
        if now != one.stamps or any(isinstance(part, Stamp) and part.young for part in now):
            one.losses.update()
            prompts = read_prompts(folder / "sample_prompts.txt")
            one.found = table(prompts, read_samples(folder / "sample"), loras, one.losses)
            one.answer = _summary(folder, one.found)
            one.stamps = now
        return one.found, one.answer


def evolution(folder: Path) -> Evolution:
    """The snapshots of a run; read again only after a file changed."""
    return _read(folder)[0]


def summary(folder: Path) -> dict[str, Any]:
    """All snapshots of a run as plain values, with its prompts, its validation and what follows from them."""
    status = view.read(folder)
    return {"run": folder.name, "name": status.name, "state": status.state, **_read(folder)[1]}


def _summary(folder: Path, found: Evolution) -> dict[str, Any]:
    texts = {one.number: one.text for one in found.prompts}
    seeds = {one.number: one.seed for one in found.prompts}
    picked, lowest = blind_vote.picked(folder), best(found.validation)

    def sample(one: Sample) -> dict[str, Any]:
        text = texts.get(one.prompt) or f"Prompt {one.prompt + 1}"
        seed = one.seed if one.seed is not None else seeds.get(one.prompt)
        return {"number": one.prompt, "prompt": text, "seed": seed, "url": versioned(one.path)}

    def row(one: Snapshot) -> dict[str, Any]:
        return {
            "step": one.step,
            "epoch": one.epoch,
            "at": one.at,
            "time": None if one.time is None else datetime.fromtimestamp(one.time, UTC).isoformat(timespec="seconds"),
            "loss": _short(one.loss),
            "val_loss": _short(one.val_loss),
            "picked": one.step is not None and one.step == picked,
            "best": lowest is not None and one.step == lowest[0],
            "lora": _lora(one.lora),
            "samples": [sample(each) for each in one.samples],
        }

    numbers = sorted({each.prompt for one in found.snapshots for each in one.samples} | set(texts))
    return {
        "prompts": [{"number": n, "prompt": texts.get(n) or f"Prompt {n + 1}", "seed": seeds.get(n)} for n in numbers],
        "snapshots": [row(one) for one in found.snapshots],
        "validation": [{"step": step, "val_loss": _short(value)} for step, value in found.validation],
        "best": None if lowest is None else {"step": lowest[0], "val_loss": _short(lowest[1])},
        "others": [{"name": one.path.name, "url": versioned(one.path)} for one in found.others],
        "picked": picked,
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _lora(lora: Lora | None) -> dict[str, Any] | None:
    if lora is None:
        return None
    return {"name": lora.path.name, "size": lora.size, "final": lora.final, "url": file_url(lora.path)}


def versioned(path: Path) -> str:
    """The URL of a file with the version that it has now: a browser keeps what it got (ui/served.py)."""
    return f"{file_url(path)}?v={stamp(path).mtime_ns:x}"


def thumb_url(path: Path) -> str:
    """The URL of a sample as a small picture (ui/thumbs.py)."""
    return f"thumbs/{quote(path.parent.parent.name)}/{quote(path.name)}"


def marks(folder: Path, loras: Sequence[Lora]) -> dict[str, str]:
    """The word beside a LoRA by file name: which one is picked."""
    step = blind_vote.picked(folder)
    name = next((one.path.name for one in loras if step is not None and one.step == step), None)
    return {name: "picked"} if name else {}
