"""`audit DIR`: every wait in a checkout's source, and what ends it.

Reads the source only: nothing is imported. A wait (audit_waits.py) is bounded by

- a *guard*: a patch of this folder puts a limit on it that names what it waits for. The patch must find its target in this
  checkout (compatibility.py); which waits it covers is a table (audit_tables.GUARDS);
- its *own timeout*, given in the call;
- the *phase limit* (guards/phase_limit.py), which ends a process whose heartbeat stops. It covers whatever keeps the main
  thread of a guarded script from making progress, and names only the phase.

What none of them bounds is *open*. Only what a script of a preset can reach (audit_calls.py) is guarded when it runs: a tool
is started without the launcher. `--against OTHER` lists what this checkout has and another one has not.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sd_scripts_patches import audit_calls, audit_waits, compatibility, locate, registry
from sd_scripts_patches import audit_tables as tables
from sd_scripts_patches.audit_source import Project
from sd_scripts_patches.audit_tables import BATCH, CALLS, DIRECT, GLOBAL, WITHIN, Guard
from sd_scripts_patches.audit_waits import Function, Wait
from sd_scripts_patches.patch import Incompatible, Patch, Target

USAGE = """usage: python -m sd_scripts_patches audit DIR [--against OTHER] [--json]

DIR: a checkout of sd-scripts or musubi-tuner. --against OTHER: list only what DIR has and the checkout OTHER has not.
Exit code: 0 when nothing that a preset's run can reach is open, 1 when something is, 2 for wrong usage.
"""
GUARD, OWN, PHASE, OPEN = "guard", "own timeout", "phase limit", "open"
BOUNDS = (GUARD, OWN, PHASE, OPEN)


@dataclass(frozen=True)
class Finding:
    """One wait and what ends it. bound: one of BOUNDS; by: what bounds it."""

    file: str
    line: int
    function: str
    kind: str
    call: str
    bound: str
    by: str
    reachable: bool


@dataclass(frozen=True)
class Report:
    """The waits of one checkout. unread: file → why it could not be judged. scripts: the entry scripts that are there."""

    folder: str
    findings: tuple[Finding, ...]
    unread: dict[str, str]
    scripts: tuple[str, ...]

    @property
    def open(self) -> list[Finding]:
        """What a preset's run can reach and nothing bounds."""
        return [f for f in self.findings if f.reachable and f.bound == OPEN]


def audit(folder: Path, patches: Sequence[Patch] | None = None) -> Report:
    """Return the waits of the checkout in `folder`."""
    project = Project(folder)
    functions = audit_waits.scan(project)
    graph = audit_calls.build(project, functions)
    checkout = compatibility.find_checkout(folder)
    if patches is None:
        patches = registry.patches(checkout.trainer if checkout else compatibility.SD_SCRIPTS)
    judge = _Judge(project, functions, graph, _rows(checkout.source if checkout else None, patches))
    findings = [judge.finding(function, wait) for function in functions.values() for wait in function.waits]
    findings.sort(key=lambda f: (f.file, f.line, f.kind, f.call))
    scripts = sorted({one.split(":")[0] for one in audit_calls.entries(project)})
    files = tuple(project.modules[name].file for name in scripts)
    return Report(str(folder), tuple(findings), project.unread, files)


# -- guards


@dataclass(frozen=True)
class _Row:
    """A guard whose target is guarded in this checkout; module and name: where the target is defined today."""

    guard: Guard
    module: str
    name: str


def _rows(source: Path | None, patches: Sequence[Patch]) -> list[_Row]:
    """Return the guards whose targets are there. source: None for a folder that is no checkout to the launcher."""
    targets = {(patch.name, str(target)): target for patch in patches for target in patch.targets}
    names = {patch.name for patch in patches}
    rows = []
    for guard in tables.GUARDS:
        target = targets.get((guard.patch, guard.target))
        if not guard.target and guard.patch in names:
            rows.append(_Row(guard, "", ""))
        elif target is not None:
            rows += _row(guard, target, source)
    return rows


def _row(guard: Guard, target: Target, source: Path | None) -> list[_Row]:
    verdict = compatibility.check_target(target, source).verdict
    if not locate.belongs_to_checkout(target.module, source):
        # A library's class: the audit may run where the library is not installed.
        return [] if verdict in compatibility.OPEN else [_Row(guard, target.module, target.name)]
    if verdict not in (compatibility.GUARDED, compatibility.MOVED) or source is None:
        return []
    try:
        place = locate.locate(target, source)
    except Incompatible:
        return []
    return [_Row(guard, place.module, place.name)]


class _Judge:
    """Decides what ends each wait."""

    def __init__(
        self, project: Project, functions: dict[str, Function], graph: audit_calls.Graph, rows: Iterable[_Row]
    ) -> None:
        self.project, self.functions, self.graph = project, functions, graph
        self.rows = list(rows)
        self.near = [row for row in self.rows if row.guard.how != CALLS]
        self.anywhere = [row for row in self.rows if row.guard.how == CALLS]
        self.guarded: dict[str, Guard] = {}  # function → the guard that surrounds it
        for row in self.rows:
            if row.guard.how == WITHIN and not row.guard.kinds:
                self.guarded[f"{row.module}:{row.name}"] = row.guard
            elif row.guard.how == BATCH:
                for one in _batch_functions(project):
                    self.guarded.setdefault(one, row.guard)
        entries = audit_calls.entries(project)
        self.main = graph.reach(entries, threads=False)
        self.bare = graph.reach(entries, barred=self.guarded, threads=False)
        self.inside = {one: graph.reach([one], threads=False) for one in self.guarded}
        self.by_module: dict[str, list[Wait]] = {}
        for function in functions.values():
            self.by_module.setdefault(function.module.name, []).extend(function.waits)
        self.starters: dict[str, list[str]] = {}
        for starter, started in graph.threads.items():
            for root in started:
                for one in graph.reach([root], threads=False):
                    self.starters.setdefault(one, []).append(starter)

    def finding(self, function: Function, wait: Wait) -> Finding:
        """Return a wait with what ends it."""
        reachable = function.id in self.graph.reached
        bound, by = self.bound(function, wait, reachable)
        return Finding(wait.file, wait.line, wait.function, wait.kind, wait.call, bound, by, reachable)

    def bound(self, function: Function, wait: Wait, reachable: bool, deep: bool = True) -> tuple[str, str]:
        """Return (one of BOUNDS, what bounds the wait)."""
        if wait.own:
            return OWN, wait.own
        # The guard that names the wait most closely: its limit is the shortest.
        for rows in (self.near, self.anywhere):
            row = next((one for one in rows if self.covers(one, wait)), None)
            if row is not None:
                return GUARD, _words(row.guard)
            if rows is self.near and function.id in self.guarded:
                return GUARD, _words(self.guarded[function.id])
        around = self.around(function.id)
        if around is not None:
            return GUARD, _words(around)
        if not reachable:
            return OPEN, ""
        if function.id in self.main:
            return PHASE, ""
        return self.on_thread(function, wait) if deep else (OPEN, "")

    def covers(self, row: _Row, wait: Wait) -> bool:
        """Whether a row bounds this call, whatever surrounds it."""
        guard = row.guard
        if guard.how in (WITHIN, BATCH) and not guard.kinds:
            return False
        if guard.kinds and wait.kind not in guard.kinds:
            return False
        if guard.calls and not re.search(guard.calls, wait.call.split("(")[0]):
            return False
        if guard.how == GLOBAL:
            return wait.module == row.module
        if guard.function:
            return (wait.function + ".").startswith(f"{guard.function}.")
        if guard.how in (DIRECT, WITHIN):
            return wait.module == row.module and (wait.function + ".").startswith(f"{row.name}.")
        return guard.how == CALLS

    def around(self, function: str) -> Guard | None:
        """Return the guard within which a function always runs."""
        name = function
        while name:
            if name in self.guarded:
                return self.guarded[name]  # the function itself, or one inside of which it is defined
            name = name.rpartition(".")[0] if "." in name.split(":")[1] else ""
        if function in self.bare or function not in self.main:
            return None
        return next((guard for one, guard in self.guarded.items() if function in self.inside[one]), None)

    def on_thread(self, function: Function, wait: Wait) -> tuple[str, str]:
        """A wait of another thread: bounded by what bounds the wait for that thread."""
        ranks: list[tuple[int, str, str]] = []
        for starter in sorted(set(self.starters.get(function.id, []))):
            owner = self.functions[starter].owner
            prefix = f"{owner.split(':')[1]}." if owner else starter.split(":")[1]
            for other in self.by_module.get(starter.split(":")[0], []):
                waits_for_it = other.kind in ("future", "thread", "queue", "event", "polling", "async", "exit")
                if not waits_for_it or other.function == wait.function or not other.function.startswith(prefix):
                    continue
                home = self.functions[f"{other.module}:{other.function}"]
                bound, by = self.bound(home, other, home.id in self.graph.reached, deep=False)
                ranks.append(
                    (BOUNDS.index(bound), bound, f"{by}{'; ' if by else ''}{other.function} waits for this thread")
                )
        if not ranks:
            return OPEN, ""
        # The exit is the last resort: where the thread is also waited for, that wait decides.
        waited = [rank for rank in ranks if "exit_grace_s" not in rank[2]] or ranks
        _, bound, by = max(waited)
        return bound, by


def _batch_functions(project: Project) -> list[str]:
    """Return what a data loader calls to make a batch: the data sets' `__getitem__`, the collators' `__call__`."""
    found = [one for one in project.method_names.get("__getitem__", ()) if "dataset" in one.lower()]
    found += [one for one in project.method_names.get("__call__", ()) if "collat" in one.split(":")[1].lower()]
    return found


def _words(guard: Guard) -> str:
    target = guard.target.rpartition(":")[2]
    return f"{guard.patch}{': ' if target else ''}{target} ({guard.limit})"


# -- comparison


def added(new: Report, old: Report) -> tuple[list[Finding], list[Finding]]:
    """Return (what `new` has and `old` has not, the reverse). What moved to another file or line is neither."""

    def without(report: Report, other: Report) -> list[Finding]:
        left = Counter(_key(f) for f in other.findings)
        rest = []
        for finding in report.findings:
            if left[_key(finding)] > 0:
                left[_key(finding)] -= 1
            else:
                rest.append(finding)
        return rest

    return without(new, old), without(old, new)


def _key(finding: Finding) -> tuple[str, str, str]:
    """What stays the same when code moves: the function's own name, the kind, the call without a module before it."""
    return finding.function.rpartition(".")[2], finding.kind, finding.call


# -- the command


def main(arguments: Sequence[str]) -> int:
    """Run `audit` and return its exit code."""
    rest = [a for a in arguments if a != "--json"]
    as_json = len(rest) < len(arguments)
    other: Path | None = None
    if "--against" in rest:
        at = rest.index("--against")
        if at + 1 >= len(rest):
            print(USAGE, end="", file=sys.stderr)
            return 2
        other = Path(rest[at + 1])
        del rest[at : at + 2]
    if len(rest) != 1 or rest[0].startswith("-"):
        print(USAGE, end="", file=sys.stderr)
        return 2
    reports = []
    for folder in [Path(rest[0]), *([other] if other else [])]:
        if not folder.is_dir():
            print(f"sd_scripts_patches: {folder} is not a folder", file=sys.stderr)
            return 1
        report = audit(folder.resolve())
        if not report.findings and not report.unread and not report.scripts:
            print(f"sd_scripts_patches: {folder} holds no training script and no wait in Python code", file=sys.stderr)
            return 1
        reports.append(report)
    report = reports[0]
    gained, lost = added(*reports) if other else ([], [])
    if as_json:
        print(json.dumps(_json(report, reports[1] if other else None, gained, lost)))
    else:
        print(_comparison(reports[1], gained, lost) if other else format_table(report))
        print("\n".join(["", *summary(report)]))
    for finding in report.open:
        print(f"sd_scripts_patches: open: {finding.file}:{finding.line} {finding.call}", file=sys.stderr)
    return 1 if report.open or report.unread else 0


def _json(report: Report, other: Report | None, gained: list[Finding], lost: list[Finding]) -> dict[str, object]:
    answer: dict[str, object] = {
        "checkout": report.folder,
        "ok": not report.open and not report.unread,
        "scripts": report.scripts,
        "reachable": counts(f for f in report.findings if f.reachable),
        "not_reachable": counts(f for f in report.findings if not f.reachable),
        "unread": report.unread,
        "waits": [asdict(f) for f in report.findings],
    }
    if other is not None:
        answer.update(against=other.folder, added=[asdict(f) for f in gained], removed=[asdict(f) for f in lost])
    return answer


def counts(findings: Iterable[Finding]) -> dict[str, int]:
    """Return the number of waits for each kind of bound."""
    found = Counter(finding.bound for finding in findings)
    return {bound: found[bound] for bound in BOUNDS}


def format_table(report: Report) -> str:
    """Return the waits as text: those that a preset's run can reach, then the others."""
    lines = []
    for reachable, title in (
        (True, "A preset's run can reach:"),
        (False, "No preset's run reaches (tools, other scripts):"),
    ):
        lines += ["", title]
        lines += [_line(finding) for finding in report.findings if finding.reachable is reachable]
    return "\n".join(lines[1:])


def _line(finding: Finding) -> str:
    by = f"  {finding.by}" if finding.by else ""
    return f"  {finding.bound:<11}  {finding.kind:<10}  {finding.file}:{finding.line}  {finding.function}  {finding.call}{by}"


def _comparison(other: Report, gained: list[Finding], lost: list[Finding]) -> str:
    lines = [f"Added since {other.folder}: {len(gained)}"]
    lines += [_line(f) + ("" if f.reachable else "  (not reached)") for f in gained]
    lines += ["", f"Removed: {len(lost)}"]
    lines += [f"  {f.kind:<10}  {f.file}:{f.line}  {f.function}  {f.call}" for f in lost]
    return "\n".join(lines)


def summary(report: Report) -> list[str]:
    """Return the counts as sentences."""
    lines = []
    for reachable, what in ((True, "reached by a preset's run"), (False, "not reached")):
        findings = [f for f in report.findings if f.reachable is reachable]
        shown = ", ".join(f"{count} {bound}" for bound, count in counts(findings).items())
        lines.append(f"{len(findings)} waits {what}: {shown}")
    if not report.scripts:
        lines.append("There is no script that a preset starts, so nothing counts as reached.")
    lines += [f"Not judged: {file}: {why}" for file, why in sorted(report.unread.items())]
    return lines
