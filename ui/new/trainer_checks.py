"""The trainer's own part of the New LoRA tab: what fits a changed version, and the command that puts the old one back."""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

import runs
from runs.quoting import quote, quote_cmd
from sd_scripts_patches import compatibility, registry, versions
from sd_scripts_patches.trainers import TRAINERS, Trainer
from ui.html import esc
from ui.run.fold import QUIET


@dataclass(frozen=True)
class Status:
    """A trainer that is installed. now: its commit, "" when unknown. before: the one to go back to, "" when nothing changed.

    used: `before` is what a run used last; else it is the commit that Hangproof is tested with.
    """

    trainer: Trainer
    now: str
    before: str = ""
    used: bool = False


def build(backend: Any, loaded: gr.State) -> None:
    """Build the part. loaded: changes when the page has its draft."""
    shown = gr.HTML(elem_id="trainer-note", apply_default_css=False)

    def on_chosen(backend: str) -> str:
        found = status(backend)
        return note(found) if found is not None else ""

    gr.on([loaded.change, backend.change], on_chosen, backend, shown, **QUIET)


def status(backend: str) -> Status | None:
    """The state of a backend's checkout; None for a backend that has none here."""
    trainer = TRAINERS.get(backend) if isinstance(backend, str) else None
    if trainer is None or not trainer.checkout.is_dir():
        return None
    now = versions.commit(trainer.checkout)
    if not now:
        return Status(trainer, "")
    before = last_used(trainer)
    if before:
        return Status(trainer, now, before if before != now else "", True)
    return Status(trainer, now, "" if now in (trainer.commit, *trainer.tested) else trainer.commit)


def last_used(trainer: Trainer) -> str:
    """The commit of the run that used this checkout last, "" when none did."""
    noted, here = [], trainer.checkout.resolve()
    for folder in runs.list_runs():
        found = versions.used(folder)
        if found and found.trainer == trainer.key and found.commits and Path(found.checkout).resolve() == here:
            noted.append(((folder / versions.FILE).stat().st_mtime_ns, found.commits[-1]))
    return max(noted)[1] if noted else ""


def changed(run: Path) -> list[str]:
    """What is said when a run continues on another version than the one it used so far; [] when it does not."""
    noted = versions.used(run)
    trainer = TRAINERS.get(noted.trainer) if noted else None
    now = versions.commit(trainer.checkout) if trainer else ""
    if noted is None or trainer is None or not noted.commits or not now or noted.commits[-1] == now:
        return []
    return [
        f"This run used commit {noted.commits[-1][:8]} of {trainer.name} so far and continues on {now[:8]}. To see what "
        "fits it, or how to go back first, stop it and choose this trainer under New LoRA."
    ]


def note(found: Status) -> str:
    """What changed, what fits it, and the way back, as HTML; "" when nothing changed."""
    if not found.before:
        return ""
    trainer, now, before = found.trainer, f"<code>{found.now[:8]}</code>", f"<code>{found.before[:8]}</code>"
    if found.used:
        says = f"<strong>{esc(trainer.name)} was changed</strong> since your last run with it. It used {before}; now it is {now}."
    else:
        says = (
            f"<strong>{esc(trainer.name)} is at {now}</strong>, which Hangproof is not tested with. "
            f"Tested: {before} ({esc(trainer.version)})."
        )
    return (
        f'<p class="hp-hint" data-testid="trainer-changed">{says} {esc(_check(trainer.checkout, found.now))} Rehearse the run before '
        f"you start it. To go back while no run trains with it: in a terminal, in the Hangproof folder, run "
        f"<code>{esc(command_back(trainer.key, found.before))}</code>.</p>"
    )


def command_back(key: str, commit: str, platform: str = sys.platform) -> str:
    """The command that puts the old version and its requirements back. It refuses where a file was changed by hand."""
    quoted, start = (quote_cmd, r".\start.bat") if platform == "win32" else (quote, "./start.sh")
    return f"{quoted(sys.executable)} -m sd_scripts_patches.versions {key} {commit} && {start} {key}"


@functools.lru_cache(maxsize=4)
def _check(checkout: Path, now: str) -> str:
    """What `python -m sd_scripts_patches check` says about a checkout at commit `now`, in a sentence or two."""
    found = compatibility.find_checkout(checkout)
    if found is None:
        return f"{checkout} is not a checkout of sd-scripts or musubi-tuner."
    findings = [compatibility.check_patch(patch, found.source) for patch in registry.patches(found.trainer)]
    waits = sorted({f"{finding.patch} ({one.open})" for finding in findings for one in finding.open})
    if not waits:
        return f"All {len(findings)} guards fit this version."
    return f"Not guarded in this version: {'; '.join(waits)}. A run that needs one of them does not start."
