"""What the leader knows of the other nodes, what it wants of them, and which part of the group has failed.

The server's threads (endpoint.py) call `receive`; the monitor's loop calls the rest. One lock guards the table. An
attempt's life here: `waiting` until all nodes are there and idle, `prepare` until all are ready, `run`, `end`.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from guards.heartbeat import Beat
from monitor.config import Nodes as Limits
from monitor.detect.progress import Signals
from monitor.nodes import wire
from monitor.nodes.wire import Order, Report
from monitor.phrases import NODE_PIDS, PHASES, count
from monitor.process.platform import ProcessInfo, signal_name, sleep
from monitor.run_folder import MonitorError, RunFolder

NODE_LOST = "node_lost"  # Evidence.outcome: a machine of the run does not answer, or has forgotten its part
SETTLE_S = (
    2.5  # after one part of the group has failed: time for the others to report, so that the first cause is found
)
KEPT = "nodes.json"  # in the folder of heartbeats: those of the other machines
MARK = ".nodes"  # in the run's folder: a node that reads the same number there shares the disk
WATCH_S = 0.05
MISSED_COUNT, MISSED_S = 3, 0.5  # reports and time without one, before a node counts as silent
# How a rank fails because another one did: not the cause where another rank has one.
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused|abort)|broken pipe|nccl|gloo|barrier|timed? ?out", re.I
)


@dataclass(frozen=True)
class Part:
    """The part of the group that failed: a node, the rank in question, and how it ended."""

    node: int
    rank: int | None
    code: int | None
    signal: int | None
    outcome: str
    note: str
    log_tail: str | None  # None: that of this machine
    ended: str  # a clause


@dataclass
class Link:
    """One node as the leader sees it. Times are the leader's monotonic clock."""

    node: int
    heard_s: float | None = None  # the last valid report; None: never
    address: str = ""
    session: str = ""
    challenge: str = ""
    report: Report | None = None
    beats: tuple[Beat, ...] = ()  # as `wire.here` gives them
    clock: wire.Clock = field(default_factory=wire.Clock)


def gather(folder: RunFolder, environ: Mapping[str, str], limits: Limits) -> Nodes | None:
    """The other machines of this run; None for a run on one machine. They are not heard before `Nodes.open`.

    MonitorError: the environment does not say where the nodes find this monitor, or what the shared secret is.
    """
    number = folder.spec.get("nodes", 1) if not folder.foreign else _number(environ.get("HANGPROOF_NODES", "1"))
    if not isinstance(number, int) or number < 2:
        return None
    where = environ.get("HANGPROOF_LEADER", "")
    if not where:
        raise MonitorError(
            f"{folder.name} trains on {number} machines: set HANGPROOF_LEADER to the address of this machine and a free "
            "port, for example 192.168.1.20:29400, and start `python -m monitor node` on the others"
        )
    gpus = folder.spec.get("gpus", 1)
    ranks = 0 if folder.foreign or not isinstance(gpus, int) else gpus
    return Nodes(folder, number, ranks, wire.address_of(where), wire.token_from(environ), limits)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 1


class Nodes:
    """The other machines of one run. `gpus`: ranks of each machine, 0 where unknown."""

    def __init__(
        self, folder: RunFolder, number: int, gpus: int, address: tuple[str, int], token: bytes, limits: Limits
    ):
        self.folder, self.number, self.gpus = folder, number, gpus
        self.host, self.port = address
        self.token, self.limits = token, limits
        self.on_departure: Callable[[], None] = lambda: (
            None
        )  # a node's machine is taken away; called by a server thread
        self.order = Order(run=folder.folder.name, lost_s=limits.lost_s, return_s=limits.return_s, shared=wire.fresh())
        self._links = {node: Link(node) for node in range(1, number)}
        self._lock = threading.Lock()
        self._decided = False  # until this monitor knows what an earlier one left, a node gets no order
        self._wanted: tuple[Any, ...] = ()  # what the order `prepare` was made from
        self._preparing: tuple[str, ...] = ()  # what the nodes last said about it
        self._ordered_s = time.monotonic()
        self._waiting_s: float | None = None
        self._failed_s: float | None = None  # a part of the group was first seen to have failed
        self._evidence = 0
        self._said: list[tuple[int, tuple[str, ...]]] = []
        self._close: Callable[[], None] = lambda: None

    # ---- the server's side ----

    def open(self, serve: Callable[[Nodes, str, int], Callable[[], None]]) -> None:
        """Listen for the nodes with `endpoint.serve`. MonitorError: the address cannot be used."""
        self.folder.replace(MARK, self.order.shared)
        self._close = serve(self, self.host, self.port)

    def receive(self, values: Mapping[str, Any], address: str) -> dict[str, Any]:
        """A node's report; the answer to it. WireError: it is not valid, and nothing of it is used."""
        report = wire.report_of(values, self.number, self.gpus)
        now_s = time.monotonic()
        with self._lock:
            link, before = self._links[report.node], self._links[report.node].report
            known, link.challenge = link.challenge, wire.fresh()
            answer = {"challenge": link.challenge}
            if not known or values.get("challenge") != known:
                return answer  # the first contact, a lost answer, or a replay: nothing of it is used
            if link.session != report.session:
                link.session, before = report.session, None
                link.clock.restart()
            elif before is not None and report.mono_s <= before.mono_s:
                return answer  # an older one that was under way for long
            link.clock.compare(now_s, report.mono_s)
            first, link.heard_s, link.address, link.report = link.heard_s is None, now_s, address, report
            link.beats = tuple(wire.here(beat, link.node, link.clock.offset_s) for beat in report.beats)
            order, decided = self.order, self._decided
        if first:
            self.folder.log(f"node {report.node} ({address}) is there")
        if report.departs and not (before and before.departs):
            self.folder.event("stopping", f"node {report.node} ({address}) has to end: its machine is needed")
            self.on_departure()
        return answer | ({"order": wire.values_of(order)} if decided else {})

    # ---- between two attempts ----

    def waiting(self) -> str:
        """Which nodes are missing or not yet clear of the last attempt, as a sentence; "" when all are ready for another."""
        with self._lock:
            self._decided = True
            found = [text for link in self._links.values() if (text := self._not_clear(link))]
        if found or self.order.want != "prepare":
            return self._patience(found)
        try:
            return self._patience(self._unready())
        except MonitorError:
            return ""  # `prepare` raises it again

    def _not_clear(self, link: Link) -> str:
        report = link.report
        if report is None or link.heard_s is None:
            return f"node {link.node} has not connected yet"
        silent_s = time.monotonic() - link.heard_s
        if silent_s > max(3 * self.limits.poll_s, self.limits.lost_s / 2):
            return f"{self._who(link)} has not been heard from for {silent_s:.0f} s{self._last_seen(link)}"
        if report.survivors:
            names = ", ".join(f"{p.name} ({p.pid})" for p in report.survivors)
            return f"node {link.node}: cannot be killed: {names}"
        if report.living or report.phase == "running":
            return f"node {link.node} still ends its part of the last attempt"
        return ""

    def _patience(self, found: list[str]) -> str:
        """The sentences as one; remembers since when there are any."""
        if not found:
            self._waiting_s = None
        elif self._waiting_s is None:
            self._waiting_s = time.monotonic()
        return "; ".join(found)

    def given_up(self) -> bool:
        """Whether the nodes have been waited for as long as `return_s` allows."""
        return self._waiting_s is not None and time.monotonic() - self._waiting_s >= self.limits.return_s

    def prepare(self, **wanted: Any) -> str:
        """Have the nodes fetch and render what this attempt needs. "" once all are ready, else a sentence.

        wanted: fields of the order. MonitorError: a node cannot; the message names it and the reason.
        """
        key = tuple(sorted(wanted.items()))
        if self.order.want != "prepare" or key != self._wanted:
            port = free_port(self.host)  # a new one for each attempt: a late process of an old one cannot join
            self._wanted = key
            self._give(want="prepare", group=wire.fresh(), main_address=self.host, main_port=port, evidence=0, **wanted)
        try:
            return self._patience(self._unready())
        except MonitorError:
            self._give(want="idle", group="")
            raise

    def _unready(self) -> list[str]:
        """What the nodes that are not ready for the attempt do. MonitorError: one cannot prepare it."""
        found = []
        with self._lock:
            reports = {link.node: link.report for link in self._links.values()}
        for node, report in reports.items():
            mine = report if report is not None and report.group == self.order.group else None
            if mine is not None and mine.problem:
                raise MonitorError(f"node {node}: {mine.problem}")
            if mine is None or mine.phase != "ready":
                found.append(f"node {node} {mine.progress if mine and mine.progress else 'prepares the attempt'}")
        if tuple(found) != self._preparing:  # it moves on
            self._preparing, self._waiting_s = tuple(found), None
        return found

    def run(self) -> None:
        """All nodes start the attempt that they have prepared."""
        self._failed_s = None
        self._give(want="run")

    def resume(self, values: Mapping[str, Any]) -> None:
        """Continue with the attempt that an earlier monitor recorded. WireError: the record is not valid."""
        order = wire.parse(Order, wire.decode(wire.encode(values)))
        shared: dict[str, Any] = {
            "shared": self.order.shared,
            "lost_s": self.limits.lost_s,
            "return_s": self.limits.return_s,
        }
        self._failed_s = None
        with self._lock:
            self._decided = True
            self.order, self._ordered_s = replace(order, want="run", evidence=0, **shared), time.monotonic()

    def _give(self, **changes: Any) -> None:
        with self._lock:
            self._decided = True
            if changes.get("want", self.order.want) != self.order.want:
                self._ordered_s = time.monotonic()
            self.order = replace(self.order, **changes)

    def record(self) -> dict[str, Any]:
        """The attempt, for the monitor that replaces this one."""
        return wire.values_of(self.order)

    def environment(self) -> dict[str, str]:
        """The variables of this machine's script."""
        return environment(0, self.order)

    # ---- while an attempt runs ----

    def beats(self) -> list[Beat]:
        """The newest beats of the other nodes' ranks."""
        return [beat for link in self._mine() for beat in link.beats]

    def living(self) -> list[ProcessInfo]:
        """The living ranks of the other nodes, as they last said."""
        return [wire.process_of(link.node, p) for link in self._mine() if link.report for p in link.report.living]

    def log_bytes(self) -> int:
        return sum(link.report.log_bytes for link in self._mine() if link.report)

    def activity(self) -> float:
        return sum(link.report.activity for link in self._mine() if link.report)

    def _mine(self) -> list[Link]:
        """The nodes whose report is about the current attempt. Copies: the server's threads change the originals."""
        with self._lock:
            links = [replace(link) for link in self._links.values()]
        return [link for link in links if link.report is not None and link.report.group == self.order.group]

    def lost(self) -> Part | None:
        """The node that has been silent for `lost_s`, or that has forgotten its part, while the group trains."""
        if self.order.want != "run":
            return None
        now_s = time.monotonic()
        with self._lock:
            links = [replace(link) for link in self._links.values()]
        for link in links:
            silent_s = now_s - max(link.heard_s or 0.0, self._ordered_s)
            if silent_s > self.limits.lost_s:
                return self._lost(link, f"has not been heard from for {silent_s:.1f} s")
            report, heard_s = link.report, link.heard_s or 0.0
            # A report that was under way when the order changed is not an answer to it.
            answered = report is not None and heard_s > self._ordered_s + 2 * self.limits.poll_s + self.limits.reply_s
            if report is not None and answered and (report.group != self.order.group or report.phase == "idle"):
                return self._lost(link, "was started again and does not know its part of this attempt")
        return None

    def silent(self) -> str:
        """The node that has missed its last reports, as a sentence, until it is heard again or `lost`; "" for none."""
        now_s = time.monotonic()
        with self._lock:
            links = [replace(link) for link in self._links.values()]
        for link in links:
            silent_s = now_s - max(link.heard_s or 0.0, self._ordered_s)
            if self.limits.lost_s >= silent_s > MISSED_COUNT * self.limits.poll_s + MISSED_S:
                return f"{self._who(link)} has not been heard from for {silent_s:.0f} s"
        return ""

    def _lost(self, link: Link, what: str) -> Part:
        note = f"{self._who(link)} {what}{self._last_seen(link)}"
        ranks = self.ranks(link)
        return Part(link.node, ranks[0] if ranks else None, None, None, NODE_LOST, note, None, note)

    def failed(self, beats: list[Beat], gone: frozenset[int], local: Part | None) -> Part | None:
        """The part that failed first, once the others had time to report. None: none failed, or not yet known.

        beats: of all ranks; gone: process numbers of those that are dead; local: this machine's part, once it has failed.
        """
        ended = [part for link in self._mine() if (part := self._ended(link)) is not None]
        parts = {part.node: part for part in [*ended, *([local] if local else [])]}
        if not parts:
            self._failed_s = None
            return None
        now_s = time.monotonic()
        self._failed_s = self._failed_s or now_s
        if now_s - self._failed_s < SETTLE_S and len(parts) < self.number:
            return None
        culprit = first_cause(beats, gone)
        node = next((part.node for part in parts.values() if culprit and self._node_of(culprit) == part.node), None)
        part = parts[min(parts) if node is None else node]
        rank = culprit.rank if culprit is not None and node is not None else part.rank
        return replace(part, rank=rank)

    @property
    def settling(self) -> bool:
        """A part has failed, and it is not yet known which failed first."""
        return self._failed_s is not None

    def _node_of(self, beat: Beat) -> int:
        return beat.pid // NODE_PIDS

    def _ended(self, link: Link) -> Part | None:
        """A node's part, when its script has ended and its ranks were not all done."""
        report = link.report
        if report is None or report.phase != "ended":
            return None
        first = next((b for b in link.beats if b.outcome in ("failed", "deadline")), next(iter(link.beats), None))
        if report.code == 0 and all(b.outcome == "done" for b in link.beats):
            return None
        outcome = first.outcome if first else ""
        how = f"exit code {report.code}" if report.code is not None else "gone without an exit code"
        how = f"killed by {signal_name(report.signal)}" if report.signal else report.note or how
        note = first.note if first and first.outcome != "running" else ""
        rank = first.rank if first else None
        ended = f"{self._who(link)}: {how}"
        return Part(link.node, rank, report.code, report.signal, outcome, note, report.log_tail, ended)

    # ---- evidence ----

    def ask_evidence(self) -> None:
        """Have every node look at its processes: a run is suspected to hang."""
        self._evidence += 1
        self._give(evidence=self._evidence)

    def drop_evidence(self) -> None:
        self._give(evidence=0)

    def _answers(self) -> list[tuple[int, Report]]:
        reports = [(link.node, link.report) for link in self._mine()]
        return [
            (node, r)
            for node, r in reports
            if r is not None and self.order.evidence and r.evidence == self.order.evidence
        ]

    def signals(self, local: Signals) -> Signals:
        """This machine's signals with those of the nodes. Nothing proves a hang before every node has answered: one that
        waits here may wait for one that works there."""
        answers = self._answers()
        complete = len(answers) == self.number - 1
        named = [
            Signals(*(tuple(f"node {n}: {text}" for text in texts) for texts in (r.stuck, r.slow, r.busy)))
            for n, r in answers
        ]
        every = [local, *named]
        stuck = tuple(text for s in every for text in s.stuck) if complete else ()
        return Signals(stuck, tuple(t for s in every for t in s.slow), tuple(t for s in every for t in s.busy))

    def stacks(self, wait_s: float) -> dict[int, str]:
        """The stacks that the nodes took, by process number; waits up to `wait_s` for nodes that can still answer."""
        if not self.order.evidence:
            self.ask_evidence()
        until_s = time.monotonic() + wait_s
        while len(answers := self._answers()) < len(self._mine()) and time.monotonic() < until_s:
            sleep(WATCH_S)
        return {wire.pid_of(node, pid): text for node, r in answers for pid, text in (r.stacks or {}).items()}

    def processes(self) -> list[dict[str, Any]]:
        """The nodes' processes, as `collect.process_facts` describes them."""
        found = []
        for node, report in self._answers():
            for facts in report.processes:
                pid, ppid = facts.get("pid"), facts.get("ppid")
                if isinstance(pid, int) and isinstance(ppid, int) and PROCESS_FACTS.keys() <= facts.keys():
                    kept = {name: kind(facts[name]) for name, kind in PROCESS_FACTS.items()}
                    numbers = {"pid": wire.pid_of(node, pid), "ppid": wire.pid_of(node, ppid)}
                    found.append(kept | numbers)
        return found

    # ---- the end of an attempt, and of the run ----

    def end(self) -> None:
        """The nodes kill what is left of the attempt."""
        self._give(want="idle", evidence=0)

    def wait_ended(self, timeout_s: float) -> list[ProcessInfo]:
        """The processes that the nodes could not kill, once all that answer have ended the attempt."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            with self._lock:
                busy = [
                    link
                    for link in self._links.values()
                    if link.report and self._answers_now(link) and not _done(link.report)
                ]
            if not busy:
                break
            sleep(WATCH_S)
        with self._lock:
            reports = {link.node: link.report for link in self._links.values() if link.report is not None}
        for node, killed in ((node, report.killed) for node, report in reports.items() if report.killed):
            if (node, killed) not in self._said:
                self._said.append((node, killed))
                self.folder.event("killed", f"node {node} killed {count(len(killed), 'process')}: {', '.join(killed)}")
        return [wire.process_of(node, p) for node, report in reports.items() for p in report.survivors]

    def _answers_now(self, link: Link) -> bool:
        return (
            link.heard_s is not None and time.monotonic() - link.heard_s < 3 * self.limits.poll_s + self.limits.reply_s
        )

    def close(self, code: int, reason: str, timeout_s: float) -> str:
        """Send the nodes home with this exit code; which of them did not hear it, as a sentence, or ""."""
        self._give(want="exit", group="", code=code, reason=reason[:2000], evidence=0)
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            with self._lock:
                left = [link for link in self._links.values() if self._answers_now(link) and not self._sent_home(link)]
            if not left:
                break
            sleep(WATCH_S)
        with self._lock:
            missing = [self._who(link) for link in self._links.values() if link.report and not self._sent_home(link)]
        self._close()
        if not missing:
            return ""
        return f"not reached: {', '.join(missing)}; without the leader a node kills its ranks within {self.limits.lost_s:.0f} s"

    def _sent_home(self, link: Link) -> bool:
        """It said, in answer to `exit`, that nothing of it is alive; the answer to that is the last that it reads."""
        report = link.report
        return (
            report is not None
            and report.phase == "idle"
            and (link.heard_s or 0.0) > self._ordered_s
            and not report.group
        )

    def stop_listening(self) -> None:
        """Close the port; the nodes keep what they run until their limit."""
        self._close()

    # ---- words ----

    def ranks(self, link: Link) -> list[int]:
        """The ranks of a node, as far as known."""
        known = [beat.rank for beat in link.beats]
        return known or list(range(link.node * self.gpus, (link.node + 1) * self.gpus))

    def _who(self, link: Link) -> str:
        """`node 1 (10.0.0.2, rank 1)`."""
        ranks = self.ranks(link)
        named = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}" if ranks else ""
        about = ", ".join(filter(None, (link.address, named)))
        return f"node {link.node}" + (f" ({about})" if about else "")

    def _last_seen(self, link: Link) -> str:
        if not link.beats:
            return ""
        beat = min(link.beats, key=lambda b: b.step)
        return f"; its rank {beat.rank} was last seen in {PHASES.get(beat.phase, beat.phase)}, step {beat.step}"

    def status(self) -> list[dict[str, Any]]:
        """The nodes for status.json."""
        now_s = time.monotonic()
        with self._lock:
            links = [replace(link) for link in self._links.values()]
        return [
            {
                "node": link.node, "address": link.address, "ranks": self.ranks(link),
                "phase": link.report.phase if link.report else None,
                "step": max((b.step for b in link.beats), default=0),
                "silent_s": round(now_s - link.heard_s, 1) if link.heard_s is not None else None,
            }
            for link in links
        ]  # fmt: skip

    def summary(self) -> str:
        """`2 nodes`."""
        return count(self.number, "node")


PROCESS_FACTS: dict[str, Callable[[Any], Any]] = {
    "name": lambda v: str(v)[:100], "state": lambda v: str(v)[:1], "wchan": lambda v: str(v)[:100], "cpu_s": float,
    "trainer": bool, "command": lambda v: str(v)[:300],
}  # fmt: skip


def _done(report: Report) -> bool:
    return not report.living and report.phase in ("idle", "ended")


def first_cause(beats: list[Beat], gone: frozenset[int]) -> Beat | None:
    """The rank that failed first: one with an error of its own, else one that was killed, else any that failed."""
    failed = [b for b in beats if b.outcome in ("failed", "deadline")]
    own = [b for b in failed if not _CONSEQUENCE.search(b.note)]
    killed = [b for b in beats if b.outcome == "running" and b.pid in gone]
    return next(iter([*own, *killed, *failed]), None)


def environment(node: int, order: Order) -> dict[str, str]:
    """The variables that tell the script of a machine which one it is, and where the first one is."""
    return {
        "HANGPROOF_NODE": str(node),
        "HANGPROOF_MAIN_ADDRESS": order.main_address,
        "HANGPROOF_MAIN_PORT": str(order.main_port),
    }


def keep_beats(folder: Path, beats: list[Beat]) -> None:
    """Write the beats of other machines into the folder of heartbeats, for `monitor diagnose`."""
    path = folder / KEPT
    temporary = path.with_suffix(".tmp")
    with contextlib.suppress(OSError):  # the attempt has ended, or the disk is full
        temporary.write_bytes(wire.encode({"beats": [wire.values_of(beat) for beat in beats]}))
        os.replace(temporary, path)


def kept_beats(folder: Path) -> list[Beat]:
    """What `keep_beats` wrote last, [] without any."""
    try:
        values = wire.decode((folder / KEPT).read_bytes()).get("beats", [])
        return [wire.parse(Beat, beat) for beat in values]
    except (OSError, wire.WireError):
        return []


def free_port(host: str) -> int:
    """A port that nothing uses on this machine now."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
