"""Judges a run before its start: values that a trainer accepts, but that make no sense on this machine or on any.

The limits and sentences are rules in presets/sanity.toml; this module computes the facts that they are about. A fact
that is not known (no images yet, no answer about the machine) is left out, and no rule about it holds. A warning
explains and lets the run start; an impossible value does not start, because it would fail or never end.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import presets
from presets.estimate import GB, disk, estimate
from presets.steps import Images, held_out, planned_steps
from runs.command import number, tier_flags
from runs.dataset import shown_per_epoch
from runs.files import Fault

if TYPE_CHECKING:
    from runs.machine import Machine
    from runs.spec import RunSpec

IMPOSSIBLE, WARNING = "impossible", "warning"
STEPS_PER_S = 10  # faster than any machine trains
Facts = dict[str, Any]


@dataclass(frozen=True)
class Finding(Fault):
    """A value that makes no sense. `severity`: "impossible" or "warning"."""

    severity: str


def judge(spec: "RunSpec", images: Images, machine: "Machine | None") -> list[Finding]:
    """What makes no sense in a run; impossible values first.

    Args:
        images: as in runs.folders.planned_steps. machine: None when it is not known.
    """
    known = facts(spec, images, machine)
    found: dict[str, Finding] = {}
    for rule in presets.read_table("sanity.toml")["rule"]:
        field = rule["field"]
        if field not in found and holds(rule, known):
            found[field] = Finding(field, rule["message"].format_map(known), rule["severity"])
    return sorted(found.values(), key=lambda finding: finding.severity != IMPOSSIBLE)


def holds(rule: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Whether all conditions of a rule hold."""
    return (
        all(name in known and known[name] > limit for name, limit in rule.get("above", {}).items())
        and all(name in known and known[name] < limit for name, limit in rule.get("below", {}).items())
        and all(known.get(name) == value for name, value in rule.get("is", {}).items())
    )


def facts(spec: "RunSpec", images: Images, machine: "Machine | None") -> Facts:
    """What the rules are about, by name; numbers, and true or false for `is`."""
    known: Facts = {
        **{name: value for name, value in spec.model_dump().items() if isinstance(value, int | float | str)},
        "generated": presets.models()[spec.model]["generated"],
        "needless_warmup": _needless_warmup(spec),
        "swaps_blocks": spec.backend != "musubi" and bool(number(spec.extra.get("blocks_to_swap"))),
    }
    known |= _rate(spec) | _length(spec, images) | _memory(spec, machine)
    if "disk_gb" in known and "free_disk_gb" in known:
        known["disk_share"] = known["disk_gb"] / max(0.001, known["free_disk_gb"])
    return known


def _needless_warmup(spec: "RunSpec") -> bool:
    """Whether a trainer of kohya's refuses the warm-up, because the scheduler has none (get_scheduler_fix)."""
    flags = {**tier_flags(spec), **spec.extra}
    schedule_free = str(flags.get("optimizer_type")).lower().endswith("schedulefree")  # which needs no scheduler
    if spec.backend == "diffusers" or schedule_free or number(flags.get("lr_warmup_steps")) <= 0:
        return False
    if flags.get("lr_scheduler_type"):
        return spec.backend == "sd-scripts"
    return (flags.get("lr_scheduler") or "constant") == "constant"


def _rate(spec: "RunSpec") -> Facts:
    """The learning rate, compared with the usual one of its optimizer."""
    flags = {**tier_flags(spec), **spec.extra}
    if "relative_step=true" in str(flags.get("optimizer_args", "")).lower():
        return {}  # Adafactor finds its own
    optimizer = str(flags.get("optimizer_type") or "adamw").lower()
    rate = number(spec.extra.get("unet_lr", spec.learning_rate), spec.learning_rate)
    usual = presets.read_table("sanity.toml")["rates"].get(optimizer)
    if usual is None:
        return {}
    return {"optimizer": optimizer, "rate": rate, "usual_rate": usual, "rate_share": rate / usual}


def _length(spec: "RunSpec", images: Images) -> Facts:
    """Steps, how often each image is used, and what is saved."""
    counts = {name: found if isinstance(found, int) else len(found) for name, found in images.items()}
    count = sum(counts.values())
    if not count:
        return {}
    fields = spec.model_dump()
    steps, samples = planned_steps(fields, images), shown_per_epoch(counts, spec.repeats)
    per_epoch = planned_steps({**fields, "max_train_steps": None, "epochs": 1}, images)
    known: Facts = {
        "images": count,
        "steps": steps,
        "steps_text": f"{steps:,} step{'s' * (steps != 1)}",
        "days": steps / STEPS_PER_S / 86400,
        "views": steps / per_epoch * samples / count,
        "no_checkpoint": (spec.save_every_n_steps or 0) > steps
        or (spec.save_every_n_steps == 0 and not spec.save_every_n_epochs),
        "held_out": sum(held_out(counts, spec.validation_split, spec.backend).values()),
    }
    return known | {"disk_gb": sum(disk(fields, counts).values()) / GB}


def _memory(spec: "RunSpec", machine: "Machine | None") -> Facts:
    """The memory that the run needs, and what this machine has."""
    needed, tier = estimate(spec.model_dump())["peak_gb"], presets.tiers()[spec.tier]["vram_gb"]
    known: Facts = {"memory_gb": needed, "limit_text": f"the {tier} GB of this choice", "memory_share": needed / tier}
    if machine is not None:
        known |= {"free_disk_gb": machine.free_disk_gb, "cuda": machine.cuda and machine.vram_gb is not None}
        if machine.vram_gb is not None:
            gpu = machine.vram_gb
            known |= {
                "gpu_name": machine.gpu_name,
                "limit_text": f"the {gpu:.0f} GB of {machine.gpu_name}",
                "memory_share": needed * GB / (gpu * 2**30),
            }
            free = gpu if machine.vram_free_gb is None else machine.vram_free_gb
            known |= {"free_gpu_gb": free * 2**30 / GB, "free_share": needed * GB / max(1.0, free * 2**30)}
    return known
