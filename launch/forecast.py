"""From what a rehearsal measured to the complete run: when it ends, the disk that it needs, and what it costs.

    time = load + encode + images × one more image + steps × one step + samples × one sample + checkpoints × one save

A pure function of the measurements, the spec and the number of images, so that it follows a change of the epochs or of
the price without another rehearsal.

measured: load_s, cache_s (with the encoders' start), image_s (each further image), step_s, sample_s (None: no samples),
save_s (LoRA and state), seconds; state_bytes, lora_bytes, cache_bytes (of `images` images), host_bytes, gpu_bytes,
gpu_total_bytes, gpu_before_bytes (other programs).
"""

import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from monitor.phrases import duration
from runs.command import samples
from runs.folders import epochs_interval, planned_steps, with_intervals
from runs.machine import free_gb
from runs.manage import size_text
from runs.paths import data_root
from runs.spec import RunSpec

FULL = 0.95  # of the GPU's memory: more leaves no room for other programs


def of(
    measured: Mapping[str, Any], spec: RunSpec, images: Mapping[str, int], captions: Iterable[str] = ()
) -> dict[str, Any]:
    """The forecast; {} where the rehearsal did not measure enough.

    images: their number by folder. captions: the first is the prompt where there is no other.

    Returns:
        {"steps", "seconds", "ends_s" (Unix time), "parts_s": {part: seconds}, "disk_bytes", "free_bytes", "cost" (None
        without a price), "gpu_bytes", "gpu_total_bytes", "host_bytes", "step_s", "warnings": sentences}
    """
    if not measured.get("step_s"):
        return {}
    spec = with_intervals(spec, images, captions)
    steps, count = planned_steps(spec, images), sum(images.values())
    seen = max(1, int(measured.get("images") or 1))
    by_epoch = (steps - 1) // interval if (interval := epochs_interval(spec, images)) else 0
    every, drawn = spec.save_every_n_steps or 0, spec.sample_every_n_steps or 0
    saves = (steps // every if every else 0) + by_epoch + 1
    pictures = steps // drawn * len(samples(spec)) if drawn else 0
    parts = {
        "loading": measured["load_s"],
        "encoding": measured["cache_s"] + max(0, count - seen) * measured["image_s"],
        "training": steps * measured["step_s"],
        "samples": pictures * (measured.get("sample_s") or 0.0),
        "checkpoints": saves * measured["save_s"],
    }
    seconds = sum(parts.values())
    kept = spec.keep_states + min(by_epoch, spec.keep_states) + 1  # as presets/estimate.py counts them
    disk = measured["state_bytes"] * kept + measured["lora_bytes"] * (by_epoch + spec.keep_states + 1)
    disk += measured["cache_bytes"] / seen * count
    found = {
        "steps": steps, "seconds": round(seconds, 1), "ends_s": round(time.time() + seconds),
        "parts_s": {name: round(value, 1) for name, value in parts.items()}, "disk_bytes": round(disk),
        "free_bytes": round(free_gb(data_root()) * 1e9), "step_s": measured["step_s"],
        "cost": round(seconds / 3600 * spec.price_per_hour, 2) if spec.price_per_hour else None,
        **{key: measured.get(key) for key in ("gpu_bytes", "gpu_total_bytes", "gpu_before_bytes", "host_bytes")},
    }  # fmt: skip
    return {**found, "warnings": _warnings(found, spec)}


def _warnings(found: Mapping[str, Any], spec: RunSpec) -> list[str]:
    said = []
    if found["disk_bytes"] > found["free_bytes"]:
        needed, free = size_text(found["disk_bytes"]), size_text(found["free_bytes"])
        said.append(f"The run writes about {needed}, and {free} are free. Free some disk space.")
    used, total = found["gpu_bytes"] or 0, found["gpu_total_bytes"] or 0
    if total and used > FULL * total:
        full = f"The GPU's memory was nearly full: {size_text(used)} of {size_text(total)}"
        said.append(f"{full}. Lower the resolution, batch size or rank.")
    if spec.spend_limit and found["cost"] and found["cost"] > spec.spend_limit:
        cost = f"It costs about {found['cost']:.2f}, more than the spend limit of {spec.spend_limit:g}"
        said.append(f"{cost}. The run would stop early.")
    return said


def lines(found: Mapping[str, Any]) -> list[str]:
    """The forecast as lines of text; none where there is none."""
    if not found:
        return []
    ends = datetime.fromtimestamp(found["ends_s"]).strftime("%A %d %B, %H:%M")
    said = [f"{found['steps']:,} steps take about {duration(found['seconds'])}: started now, the run ends on {ends}."]
    if found["gpu_bytes"]:
        before = found["gpu_before_bytes"] or 0
        other = f" ({size_text(before)} was in use before)" if before > 0.02 * found["gpu_total_bytes"] else ""
        total = size_text(found["gpu_total_bytes"])
        said.append(f"GPU memory: {size_text(found['gpu_bytes'])} of {total} at its peak{other}.")
    said.append(f"Memory of the training: {size_text(found['host_bytes'] or 0)} at its peak.")
    said.append(f"Disk: about {size_text(found['disk_bytes'])}; {size_text(found['free_bytes'])} are free.")
    if found["cost"] is not None:
        said.append(f"Cost: about {found['cost']:.2f}.")
    return [*said, *found["warnings"]]
