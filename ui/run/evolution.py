"""The snapshots of a run as plain values, for the API, and the addresses of its pictures."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runs.evolution import Lora, Prompt, Sample, Snapshot, best
from ui.dataset.images import file_url
from ui.run import blind_vote, view
from ui.run.readers import stamp


def summary(folder: Path) -> dict[str, Any]:
    """All snapshots of a run as plain values, with its prompts, its validation and what follows from them."""
    run, found = view.read(folder), view.evolution(folder)
    known = {one.number: one for one in found.prompts}
    numbers = sorted({each.prompt for one in found.snapshots for each in one.samples} | set(known))
    picked, lowest = blind_vote.picked(folder), best(found.validation)

    def prompt(number: int) -> dict[str, Any]:
        one = known.get(number, Prompt(number, "", None))
        return {"number": number, "prompt": one.text or f"Prompt {number + 1}", "seed": one.seed}

    def sample(one: Sample) -> dict[str, Any]:
        seed = {} if one.seed is None else {"seed": one.seed}
        return {**prompt(one.prompt), **seed, "url": versioned(one.path)}

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
            "lora": one.lora and _lora(one.lora),
            "samples": [sample(each) for each in one.samples],
        }

    return {
        "run": folder.name,
        "name": run.name,
        "state": run.state,
        "prompts": [prompt(number) for number in numbers],
        "snapshots": [row(one) for one in found.snapshots],
        "validation": [{"step": step, "val_loss": _short(value)} for step, value in found.validation],
        "best": None if lowest is None else {"step": lowest[0], "val_loss": _short(lowest[1])},
        "others": [{"name": one.path.name, "url": versioned(one.path)} for one in found.others],
        "picked": picked,
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _lora(lora: Lora) -> dict[str, Any]:
    return {"name": lora.path.name, "size": lora.size, "final": lora.final, "url": file_url(lora.path)}


def versioned(path: Path) -> str:
    """The URL of a file with the version that it has now: a browser keeps what it got (ui/served.py)."""
    return f"{file_url(path)}?v={stamp(path).mtime_ns:x}"
