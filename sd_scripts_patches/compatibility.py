"""Checks the patches against a checkout from the syntax trees alone: no torch, no import of sd-scripts, about 1 s.

`check DIR` runs it for a person, on any checkout: what is guarded where it was, what moved and is still guarded, what
is missing and which wait that leaves open. The launcher runs it before it starts the script, so a checkout that lacks
what a run relies on stops at once with a table, and not after ten minutes of loading or with guards missing.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sd_scripts_patches import locate
from sd_scripts_patches.locate import Place
from sd_scripts_patches.patch import Incompatible, Patch, Target

GUARDED, MOVED, CHANGED, MISSING, NOT_NEEDED = "guarded", "moved", "changed", "missing", "not needed"
OPEN = (CHANGED, MISSING)
VERDICTS = (GUARDED, MOVED, CHANGED, MISSING, NOT_NEEDED)
SD_SCRIPTS, MUSUBI = "sd-scripts", "musubi-tuner"
MARKERS = {
    SD_SCRIPTS: ("train_network.py", "library", "networks"),
    MUSUBI: ("musubi_tuner/training/trainer_base.py", "musubi_tuner/dataset"),
}
"""Files and folders that identify the folder from which a trainer's modules are named."""


@dataclass(frozen=True)
class Checkout:
    """trainer: SD_SCRIPTS or MUSUBI. source: the folder from which its modules are named (musubi-tuner: `src`)."""

    trainer: str
    source: Path


@dataclass(frozen=True)
class TargetFinding:
    """One target checked against one checkout.

    place: "module:name" where it is defined today, "" when it is not there. open: the wait that stays without a limit.
    """

    target: str
    verdict: str
    place: str
    reason: str
    open: str


@dataclass(frozen=True)
class Finding:
    """One patch checked against one checkout. verdict: that of its worst target."""

    patch: str
    verdict: str
    why: str
    targets: tuple[TargetFinding, ...]

    @property
    def open(self) -> tuple[TargetFinding, ...]:
        """The targets that are not guarded."""
        return tuple(target for target in self.targets if target.verdict in OPEN)


def find_checkout(folder: Path) -> Checkout | None:
    """Return the checkout whose scripts lie in `folder`; None when there is none.

    The scripts of musubi-tuner are in its own folder and in src/musubi_tuner.
    """
    places = ((SD_SCRIPTS, folder), (MUSUBI, folder / "src"), (MUSUBI, folder), (MUSUBI, folder.parent))
    for trainer, source in places:
        if all((source / name).exists() for name in MARKERS[trainer]):
            return Checkout(trainer, source)
    return None


def check_target(target: Target, checkout: Path | None, why: str = "") -> TargetFinding:
    """Return the verdict on one target."""

    def finding(verdict: str, place: Place | None = None, reason: str = "") -> TargetFinding:
        where = f"{place.module}:{place.name}" if place else ""
        waits = (target.wait or why) if verdict in OPEN else ""
        return TargetFinding(str(target), verdict, where, reason, waits)

    installed = not locate.belongs_to_checkout(target.module, checkout)
    if installed and locate.find_source(target.module, checkout) is None:
        return finding(NOT_NEEDED, reason=f"{target.module} is not installed")
    try:
        place = locate.locate(target, checkout)
    except Incompatible as error:
        absent = locate.find_source(target.module, checkout) is None
        return finding(NOT_NEEDED if target.optional and absent else MISSING, reason=str(error))
    try:
        node, tree = locate.node_of(place, checkout), locate.tree_of(place, checkout)
        if target.params is not None:
            found = _parameters(node)
            if found is None:
                return finding(CHANGED, place, "is not a function")
            if found[: len(target.params)] != target.params:
                return finding(CHANGED, place, f"takes ({', '.join(found)}), expected ({', '.join(target.params)}, …)")
        mismatch = target.check(tree) if target.check is not None else None
    except Incompatible as error:
        return finding(CHANGED, place, str(error))
    if mismatch:
        return finding(CHANGED, place, mismatch)
    return finding(MOVED if place.moved else GUARDED, place)


def check_rewrite(target: Target, rewrite: object, checkout: Path | None, why: str) -> TargetFinding:
    """Return the verdict on one rewrite, by trying it on a copy of the tree."""
    assert callable(rewrite)
    what = f"{target} (rewritten)"
    try:
        place = locate.locate(target, checkout)
        source = locate.find_source(place.module, checkout)
        assert source is not None
        rewrite(locate.parse_uncached(source))
    except Incompatible as error:
        return TargetFinding(what, CHANGED, "", str(error), target.wait or why)
    verdict = MOVED if place.moved else GUARDED
    return TargetFinding(what, verdict, f"{place.module}:{place.name}", "", "")


def check_patch(patch: Patch, checkout: Path | None) -> Finding:
    """Check one patch. Its verdict is that of its worst target."""
    targets = [check_target(target, checkout, patch.why) for target in patch.targets]
    targets += [check_rewrite(target, rewrite, checkout, patch.why) for target, rewrite in patch.rewrites]
    verdicts = {target.verdict for target in targets} - {NOT_NEEDED}
    worst = next((v for v in (MISSING, CHANGED, MOVED, GUARDED) if v in verdicts), NOT_NEEDED if targets else GUARDED)
    return Finding(patch.name, worst, patch.why, tuple(targets))


def refusal(patches: Sequence[Patch], checkout: Path, arguments: Sequence[str], strict: bool) -> tuple[str, list[str]]:
    """Return (why a run must not start, or ""; one line for each target that is open but not relied on).

    arguments: the script's command line. strict: everything counts as relied on.
    """
    relied_on, spared = [], []
    for patch in patches:
        finding = check_patch(patch, checkout)
        if finding.open and (strict or patch.relevant(arguments)):
            relied_on.append(finding)
        else:
            spared += [f"{one.target} is {one.verdict} ({one.reason})" for one in finding.open]
    if not relied_on:
        return "", spared
    names = ",".join(finding.patch for finding in relied_on)
    return (
        f"{format_table(relied_on)}\nhangproof: incompatible with {checkout}: {names}. Nothing was loaded. "
        f"Use the pinned version, or run without these guards at your own risk: --hangproof_without={names}"
    ), spared


def format_table(findings: Sequence[Finding]) -> str:
    """Return the findings as text: a line for each patch and each target, what is wrong, and which wait is open."""
    lines = [f"{'verdict':<10}  {'patch':<11}  what it prevents"]
    for finding in findings:
        lines.append(f"{finding.verdict:<10}  {finding.patch:<11}  {finding.why}")
        for target in finding.targets:
            there = f" -> {target.place}" if target.verdict == MOVED else ""  # no arrow in Windows' code pages
            lines.append(f"{'':<12}{target.verdict:<10}  {target.target}{there}")
            if target.verdict in OPEN:
                lines.append(f"{'':<12}! {target.reason}")
                lines.append(f"{'':<12}! open: {target.open}")
    return "\n".join(lines)


def _parameters(node: ast.AST) -> tuple[str, ...] | None:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    return tuple(a.arg for a in [*node.args.posonlyargs, *node.args.args])
