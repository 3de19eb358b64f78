"""Time, GPU memory and disk space of the run, beside its steps, and what each estimate is based on."""

from collections.abc import Mapping

import presets
import runs
from presets.estimate import cost, disk, estimate
from runs import history, weights
from runs.machine import Machine, free_gb, this_machine
from runs.manage import size_text
from ui.html import duration, esc
from ui.new.form import Review


def html(review: Review) -> str:
    """The estimates as HTML; "" without images or with invalid fields."""
    if not sum(review.images.values()) or (spec := review.spec) is None:
        return ""
    machine = this_machine(spec.backend)
    seconds, source = history.expected(spec, review.steps)
    lines = {
        "Time": _time(spec, seconds, source, machine),
        "Cost": _cost(spec, seconds),
        "GPU memory": _memory(spec, machine),
        "Disk": _disk(spec, review.images),
        "Samples": _samples(spec),
    }
    rows = "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in lines.items() if text)
    return f'<dl class="hp-estimates" data-testid="estimates">{rows}</dl>'


def _time(spec: "runs.RunSpec", seconds: float, source: str, machine: Machine) -> str:
    toy = presets.models()[spec.model]["generated"]
    known = toy or machine.vram_gb or source.startswith("measured on this machine")
    where = "" if known else "On a GPU of this size: "
    return f"{where}about {duration(_rounded(seconds))} <span>({esc(source)})</span>"


def _cost(spec: "runs.RunSpec", seconds: float) -> str:
    """The cost at the price an hour; "" without a price."""
    if (found := cost(spec.model_dump(), seconds)) is None:
        return ""
    text = f"about {found:.2f} <span>(at {spec.price_per_hour:g} per hour)</span>"
    if not spec.spend_limit or found <= spec.spend_limit:
        return text
    limit = f"The spend limit of {spec.spend_limit:g} ends the run before. Raise the limit, or train fewer steps."
    return f'{text} <span class="hp-warn">{limit}</span>'


def _rounded(seconds: float) -> float:
    """Seconds without a precision that an estimate does not have."""
    unit = 5 if seconds < 120 else 60 if seconds < 3600 else 600
    return max(unit, round(seconds / unit) * unit)


def _memory(spec: "runs.RunSpec", machine: Machine) -> str:
    found = estimate(spec.model_dump())
    needed_gb = found["peak_gb"]
    if presets.models()[spec.model]["generated"] and not machine.vram_gb:
        return "none; this model trains on the processor"
    text = f"about {needed_gb:.1f} GB at {spec.resolution} pixels"
    if machine.vram_gb and needed_gb > machine.vram_gb:
        return f'<span class="hp-warn">{text}; your GPU has {machine.vram_gb:g} GB. Lower the resolution, batch size or rank.</span>'
    text += f" <span>(your GPU has {machine.vram_gb:g} GB)</span>" if machine.vram_gb else ""
    return f"{text} <span>({esc(found['note'])})</span>"


def _disk(spec: "runs.RunSpec", images: Mapping[str, int]) -> str:
    written = disk(spec.model_dump(), images)
    download, folder = weights.to_download(spec)
    parts = {**({"model download": download} if download else {}), **written}
    named = ", ".join(f"{name} {size_text(count)}" for name, count in parts.items())
    free = free_gb(runs.data_root())
    text = f"about {size_text(sum(parts.values()))} <span>({esc(named)}; {free:.0f} GB free)</span>"
    places = ((runs.data_root(), free, sum(written.values())), (folder, free_gb(folder), download))
    short = [f"{place} has {left:.1f} GB free" for place, left, needed in places if needed / 1e9 > left]
    if short:
        text += f' <span class="hp-warn">Too little space: {esc("; ".join(short))}. Free some space.</span>'
    return text


def _samples(spec: "runs.RunSpec") -> str:
    epochs = spec.extra.get("sample_every_n_epochs")  # which decides, where both are set
    if not (spec.sample_every_n_steps or epochs):
        if spec.sample_every_n_steps == 0 and not spec.prompts and not spec.trigger.strip():
            return "none: there is no trigger word, prompt or caption to draw"
        return "off"
    prompt = (spec.prompts or [spec.trigger])[0]
    more = f" and {len(spec.prompts) - 1} more" if len(spec.prompts) > 1 else ""
    when = f"{epochs} epochs" if epochs else f"{spec.sample_every_n_steps:,} steps"
    return f"every {esc(when)} <span>(“{esc(prompt)}”{more})</span>"
