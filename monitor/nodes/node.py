"""The monitor of a node: asks the leader once a second what to do, does it, and kills its ranks when nobody answers.

Slow work (copying, rendering, killing) is done by one thread at a time, so that the node never stops reporting. What must
survive this process is in `node-N.json`: a monitor that replaces a killed one adopts the living part of the attempt.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from guards import limits as guard_limits
from monitor import config
from monitor.attempt import Attempt, AttemptView
from monitor.config import Config
from monitor.detect.probe import Probe
from monitor.diagnose import collect
from monitor.gpu import nvml
from monitor.gpu.queue import GpuQueue
from monitor.nodes import files, wire
from monitor.nodes.leader import MARK, environment
from monitor.nodes.wire import Order, Report
from monitor.process import platform, tree
from monitor.process.locks import Lock
from monitor.process.tree import Tree
from monitor.resume import script
from monitor.run_folder import SCRIPT, MonitorError, RunFolder, find, read_json
from monitor.state import AttemptRecord

EXIT_ERROR, EXIT_LOST = 1, 5
ENDINGS = {0: "completed", 3: "stopped", 5: "preempted"}  # of node-N.json, for the keeper: see keeper.FINAL_CODES
EVIDENCE_S = 2.0  # between two samples of a suspected hang
STACK_CHARACTERS = 64_000  # of one process
LOG_CHARACTERS = 64_000
RETRY_S = 2.0  # after a copy that failed, a process that could not be killed
ERROR_PAUSE_S = 0.5


class NoContact(OSError):
    """The leader did not answer, or somebody else did."""


class Client:
    """Asks the leader. One connection for each request: a cut link costs that request."""

    def __init__(self, address: tuple[str, int], token: bytes, reply_s: float):
        self.address, self.token, self.reply_s = address, token, reply_s

    @contextlib.contextmanager
    def _request(self, path: str, values: dict[str, Any]) -> Any:
        body = wire.encode(values | {"nonce": wire.fresh()})
        signature = wire.sign(self.token, b"request", path.encode(), body)
        connection = http.client.HTTPConnection(*self.address, timeout=self.reply_s)
        try:
            connection.request("POST", path, body, {wire.SIGNATURE: signature})
            response = connection.getresponse()
            if response.status == 403:
                raise NoContact("the leader has another HANGPROOF_NODE_TOKEN; set the same one on every machine")
            if response.status != 200:
                raise NoContact(f"the leader refused {path}: {response.status} {response.reason}")
            yield response, signature
        except http.client.HTTPException as error:
            raise NoContact(f"no answer of the leader: {error!r}") from error
        finally:
            connection.close()

    def ask(self, path: str, values: dict[str, Any]) -> dict[str, Any]:
        """The leader's answer. OSError: none came. WireError: it is not the leader's, or not valid."""
        with self._request(path, values) as (response, signature):
            body = response.read(wire.ANSWER_BYTES + 1)
            if len(body) > wire.ANSWER_BYTES:
                raise wire.WireError("the answer is too large")
            given = response.getheader(wire.SIGNATURE) or ""
            if not wire.signed_by(self.token, given, b"answer", signature.encode(), body):
                raise wire.WireError("the answer is not signed by the leader")
            return wire.decode(body)

    def fetch(self, name: str, offset: int, path: Path) -> None:
        """Append the leader's file `name` to `path`, from this byte on. OSError: the link or the disk."""
        with self._request(wire.FILE, {"name": name, "offset": offset}) as (response, _), open(path, "ab") as file:
            while chunk := response.read(files.CHUNK):
                file.write(chunk)


class Cancelled(Exception):
    """The order changed while a thread worked on it."""


@dataclass
class Work:
    """What a thread does; `result` once it is done."""

    what: str
    group: str
    thread: threading.Thread | None = None
    cancelled: bool = False


class Node:
    """One node's part of the run in `folder`."""

    def __init__(self, folder: RunFolder, node: int, client: Client, limits: Config):
        self.folder, self.node, self.client, self.limits = folder, node, client, limits
        self.state_file = state_name(node)
        self.waker = platform.Waker()
        self.order = Order(lost_s=limits.nodes.lost_s, return_s=limits.nodes.return_s)
        self.session, self.challenge = wire.fresh(), ""
        self.heard_s = time.monotonic()
        self.contact, self.error = False, ""
        self.signals: list[int] = []
        self.leave_by_s: float | None = None
        self.group = ""  # of the attempt that is prepared, runs or has ended here
        self.ready: tuple[Path, Path | None] | None = None  # its script and the state it resumes from
        self.attempt: Attempt | None = None
        self.view: AttemptView | None = None
        self.ended = False
        self.code: int | None = None
        self.signal: int | None = None
        self.note, self.problem, self.progress, self.log_tail = "", "", "", ""
        self.killed: tuple[str, ...] = ()
        self.survivors: tuple[platform.ProcessInfo, ...] = ()
        self.work: Work | None = None
        self.retry_s = 0.0
        self.queue: GpuQueue | None = None
        self.gpus = nvml.Gpus()
        self.probe: Probe | None = None
        self.evidence, self.sampled_s = 0, 0.0
        self._errors: set[str] = set()

    def run(self) -> int:
        """Follow the leader until it sends this node home, or is silent for too long; the exit code."""
        for name in ("SIGTERM", "SIGINT"):
            signal.signal(getattr(signal, name), self._received)
        platform.become_subreaper()
        code = None
        try:
            self.adopt()
            while code is None:
                try:
                    code = self.step()
                except Exception:  # noqa: BLE001 - the top of the loop: logged once, and the next turn tries again
                    self._unexpected()
            return code
        finally:
            self.drop_probe()
            self.gpus.close()
            if self.queue is not None:
                self.queue.release()
            self.save(ENDINGS.get(code if code is not None else EXIT_ERROR, "failed"))

    def _received(self, number: int, _frame: object) -> None:
        self.signals.append(number)
        self.waker.wake()

    def _unexpected(self) -> None:
        text = traceback.format_exc()
        if text not in self._errors:
            self._errors.add(text)
            self.folder.log(f"unexpected error; the node continues\n{text}")
        time.sleep(ERROR_PAUSE_S)

    def step(self) -> int | None:
        """One turn: observe, ask, obey. The exit code at the end of the run."""
        self.poll()
        order = self.ask()
        now_s = time.monotonic()
        if order is not None:
            self.order = order
            if order.want == "exit" and self.is_clear():
                self.folder.log(f"the run has ended: {order.reason}")
                return order.code
        silent_s = now_s - self.heard_s
        gone = self.leave_by_s is not None and now_s > self.leave_by_s
        if silent_s > self.order.lost_s or gone:
            if self.is_alive() and not self._kills():
                self.kill("its machine was taken away" if gone else f"no contact with the leader for {silent_s:.0f} s")
            elif not self.is_alive() and (gone or silent_s > self.order.lost_s + self.order.return_s):
                self.folder.log(
                    f"gave up: {'its machine was taken away' if gone else f'no contact with the leader for {silent_s:.0f} s'}"
                )
                return EXIT_LOST
        elif order is not None:
            self.obey(order)
        if self.signals and self.leave_by_s is None:
            self.folder.log("has to end; the leader is asked to save a checkpoint first")
            self.leave_by_s = now_s + self.limits.end.preempt_total_s
        self.waker.sleep(self.limits.nodes.poll_s)
        platform.reap()
        return None

    # ---- talking ----

    def ask(self) -> Order | None:
        """Send the report; the order in the answer, None without contact or without an order."""
        report = self.report()
        try:
            values = wire.values_of(report) | {"challenge": self.challenge}
            answer = self.client.ask(wire.POLL, values)
            self.challenge = str(answer.get("challenge", ""))
            if "order" not in answer:  # our challenge was an old one: ask again with the new one
                answer = self.client.ask(wire.POLL, values | {"challenge": self.challenge})
                self.challenge = str(answer.get("challenge", ""))
            order = wire.parse(Order, answer["order"]) if isinstance(answer.get("order"), dict) else None
            if order is not None and (order.want not in wire.WANTS or order.lost_s <= 0 or order.return_s < 0):
                raise wire.WireError(f"an order to {order.want!r}")
        except (OSError, wire.WireError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if self.contact or reason != self.error:
                self.folder.log(
                    f"no contact with the leader at {self.client.address[0]}:{self.client.address[1]}: {reason}"
                )
            self.contact, self.error = False, reason
            return None
        if order is None:
            return None
        self.heard_s = time.monotonic()
        if not self.contact:
            self.folder.log("in contact with the leader")
        self.contact, self.error = True, ""
        return order

    def report(self) -> Report:
        """What the leader gets to know now."""
        view, probe = self.view, self.probe
        mine = self.attempt is not None and not self.ended
        found = Report(
            node=self.node,
            session=self.session,
            mono_s=time.monotonic(),
            group=self.group,
            phase=self.phase(),
            problem=self.problem,
            progress=self.progress,
            beats=tuple(view.beats) if view else (),
            living=tuple(view.living) if view and mine else (),
            log_bytes=view.log_bytes if view else 0,
            activity=view.activity if view else 0.0,
            code=self.code,
            signal=self.signal,
            note=self.note,
            killed=self.killed,
            survivors=self.survivors,
            log_tail=self.log_tail if self.ended else "",
            departs=self.leave_by_s is not None,
        )
        if probe is None or not mine or view is None or self.attempt is None:
            return found
        missing: list[str] = []
        return replace(
            found,
            evidence=self.evidence,
            stuck=probe.signals.stuck,
            slow=probe.signals.slow,
            busy=probe.signals.busy,
            stacks={pid: text[:STACK_CHARACTERS] for pid, text in probe.texts().items()},
            processes=tuple(collect.process_facts(self.attempt.tree.members, [b.pid for b in view.beats], missing)),
        )

    def phase(self) -> str:
        if self.attempt is not None:
            return "ended" if self.ended else "running"
        if self.ended:
            return "ended"
        if self.group and self.ready is not None and self.queue is not None and not self.progress:
            return "ready"
        return "preparing" if self.group else "idle"

    def is_alive(self) -> bool:
        """A part of an attempt lives here, as far as known."""
        return self.attempt is not None and not self.ended

    def is_clear(self) -> bool:
        """Nothing of an attempt is here, and the leader knows."""
        return not self.group and self.attempt is None and self.work is None

    # ---- obeying ----

    def obey(self, order: Order) -> None:
        """Bring this node nearer to what the leader wants."""
        if order.evidence != self.evidence:
            self.drop_probe()
            self.evidence = order.evidence
        if self.probe is None and order.evidence and self.is_alive() and self.view is not None and not self._kills():
            self.start_probe()
        other = order.want in ("idle", "exit") or order.group != self.group
        if other and not self.forget():
            return
        if order.want == "prepare":
            self.prepare(order)
        elif order.want == "run" and self.phase() == "ready":
            self.start(order)

    def forget(self) -> bool:
        """End and forget the attempt that is here; True once nothing of it is left."""
        if self.work is not None:
            self.work.cancelled = True
            return False
        if self.is_alive():
            self.kill("")
            return False
        if self.attempt is not None:
            self.attempt.close()
        if self.group:
            if self.queue is not None:
                self.queue.release()
            self.drop_probe()
            self.group, self.attempt, self.view, self.ready, self.queue = "", None, None, None, None
            self.ended, self.code, self.signal = False, None, None
            self.note = self.problem = self.progress = self.log_tail = ""
            self.save()
        return True

    def prepare(self, order: Order) -> None:
        """Fetch and render what the attempt needs, in a thread; then wait for the GPU."""
        if not self.group:
            self.group, self.killed = order.group, ()
        if self.ready is None and self.work is None and not self.problem and time.monotonic() >= self.retry_s:
            self.begin(Work("prepare", order.group), lambda work: self._prepare(order, work))
        elif self.ready is not None:
            if self.queue is None:
                self.queue = GpuQueue(self.folder.name, RunFolder(self.folder.folder).spec, self.gpus.listed)
                self.queue.ask(None)
                self.queue.queued_at_s = self.queue.queued_at_s
            self.progress = "" if self.queue.acquire() else self.queue.message

    def _prepare(self, order: Order, work: Work) -> None:
        """In the thread. MonitorError: a person must act."""
        run = self.folder.folder
        if order.run != run.name:
            raise MonitorError(f"the leader trains {order.run}, this node was started for {run.name}")
        mark = ""
        with contextlib.suppress(OSError):
            mark = (run / MARK).read_text(encoding="utf-8").strip()
        shared = bool(mark) and mark == order.shared
        resume = _state_path(run, order, shared)

        def fetch(name: str, offset: int, path: Path) -> None:
            if work.cancelled:
                raise Cancelled
            self.client.fetch(name, offset, path)

        def progress(text: str) -> None:
            if work.cancelled:
                raise Cancelled
            self.progress = text

        if not shared:
            progress("asks the leader for its files")
            patient = Client(
                self.client.address, self.client.token, max(self.client.reply_s, self.limits.check.verify_s)
            )
            wanted = files.listed(patient.ask(wire.LIST, {"group": order.group}))
            files.Copier(self.folder, fetch, progress).copy(wanted, order.resume)
            if not self.folder.foreign:
                (run / SCRIPT).unlink(missing_ok=True)  # of an earlier job, or with the leader's paths
        folder = RunFolder(run)  # reads run.toml, which may be new
        progress("renders the script")

        def pause(seconds: float) -> None:
            time.sleep(seconds)
            progress(self.progress)

        if problems := script.start_problems(folder, self.limits.check.render_s, pause):
            raise MonitorError("; ".join(problems))
        if shared or folder.foreign:
            path = run / (Path(order.script).name if shared else SCRIPT)
        else:
            changes = [json.loads(text) for text in order.changes]
            arguments = (changes, [change["name"] for change in changes])
            number = max(2, order.attempt)  # attempt 1 would be train.sh itself, which may not be there
            path = script.render(folder, number, resume, *arguments, self.limits.check.render_s, pause).script
        if not path.is_file():
            raise MonitorError(f"{path} does not exist")
        self.ready, self.progress = (path, resume), ""

    def begin(self, work: Work, function: Callable[[Work], None]) -> None:
        """Do something in the thread; what goes wrong is reported or tried again."""

        def guarded() -> None:
            try:
                function(work)
            except Cancelled:
                self.progress = ""
            except MonitorError as error:
                self.problem = str(error)
                self.folder.log(f"cannot take part: {error}")
            except (files.CopyError, wire.WireError, OSError) as error:
                self.progress = f"tries again: {getattr(error, 'strerror', None) or error}"
                self.folder.log(f"{work.what}: {error}; trying again")
                self.retry_s = time.monotonic() + RETRY_S
            except Exception:  # noqa: BLE001 - the top of the thread
                self.problem = f"unexpected error: {traceback.format_exc().strip().splitlines()[-1][:300]}"
                self.folder.log(f"unexpected error\n{traceback.format_exc()}")
            finally:
                self.work = None
                self.waker.wake()

        work.thread = threading.Thread(target=guarded, name=work.what, daemon=True)
        self.work = work
        work.thread.start()

    def start(self, order: Order) -> None:
        """Start this node's part; recorded first, so that no kill of this process can leave one that nobody knows."""
        assert self.ready is not None and self.queue is not None
        path, resume = self.ready
        attempt = Attempt.prepare(self.folder, order.attempt, platform.now(), collect.oom_kills())
        self.attempt, self.view = attempt, None
        self.save()
        variables = environment(self.node, order) | {tree.NODE_RUN: self._mark()}
        try:
            attempt.start(path, resume, self.queue.handles(), variables)
        except OSError as error:
            self.note, self.ended = f"cannot be started: {error.strerror or error}", True
            attempt.close()
        self.save()
        self.folder.log(
            f"started attempt {order.attempt} ({path.name}, from {resume or 'the start'}), pid {attempt.pid}"
        )

    def _mark(self) -> str:
        """What the environment of this node's processes carries."""
        return f"{self.node}:{self.folder.folder}"

    # ---- watching ----

    def poll(self) -> None:
        """Observe the attempt; its end, and the evidence that the leader wants."""
        attempt = self.attempt
        if attempt is None or self.ended or self._kills():
            return
        now = platform.now()
        self.view = attempt.poll(now, self.limits.watch.tree_s)
        if self.view.gone:
            self.kill("")  # what a launcher that died has left
            return
        if self.probe is not None:
            self.probe.poll()
            if now.mono_s - self.sampled_s >= EVIDENCE_S:
                self.probe.sample_again(self.view.beats)
                self.sampled_s = time.monotonic()

    def start_probe(self) -> None:
        assert self.attempt is not None and self.view is not None
        self.probe = Probe(self.attempt.tree, self.attempt.heartbeats, self.limits, self.gpus.read)
        self.probe.begin(self.view.beats, full=True)
        self.sampled_s = time.monotonic()

    def drop_probe(self) -> None:
        if self.probe is not None:
            self.probe.close()
            self.probe = None

    def _kills(self) -> bool:
        return self.work is not None and self.work.what == "kill"

    def kill(self, note: str) -> None:
        """Kill what is left of the attempt, in the thread. `note`: why, "" when the leader knows."""
        attempt, end = self.attempt, self.limits.end
        if attempt is None or self.work is not None or time.monotonic() < self.retry_s:
            return
        self.drop_probe()
        if note:
            self.folder.log(f"killing its ranks: {note}")

        def work(_: Work) -> None:
            result = attempt.kill(end.grace_s, end.kill_wait_s)
            self.killed = (*self.killed, *(f"{p.name} ({p.pid})" for p in result.killed))
            self.survivors = result.survivors
            if result.survivors:
                self.retry_s = time.monotonic() + RETRY_S
                return
            view = attempt.poll(platform.now(), 0.0, fresh=True)
            status = attempt.exit_status(view.beats)
            self.view, self.code, self.signal = view, status.code, status.signal
            self.note = note
            self.log_tail = self.folder.log_tail(attempt.record.log_start, self.limits.check.log_tail_bytes)[
                -LOG_CHARACTERS:
            ]
            self.ended = True
            self.save()
            if self.queue is not None:
                self.queue.release()
            self.folder.log(f"attempt {attempt.record.number} has ended here: {note or status}")

        self.begin(Work("kill", self.group), work)

    # ---- what survives this process ----

    def save(self, state: str = "watching") -> None:
        """Write node-N.json."""
        record = asdict(self.attempt.record) if self.attempt is not None else None
        values = {"version": 1, "state": state, "group": self.group, "attempt": record, "ended": self.ended}
        values |= {"code": self.code, "signal": self.signal, "note": self.note}
        self.folder.replace(self.state_file, json.dumps(values, indent=1), sync=True)

    def adopt(self) -> None:
        """Take up what an earlier monitor of this node left; kill what nobody has recorded."""
        values = read_json(self.folder.folder / self.state_file) or {}
        record = values.get("attempt") if values.get("version") == 1 else None
        if isinstance(record, dict) and values.get("group"):
            record |= {"root": tuple(record["root"]) if record.get("root") else None}
            attempt = Attempt.adopt(self.folder, AttemptRecord(**record))
            self.group = str(values["group"])
            self.ended = bool(values.get("ended")) or attempt is None
            self.code, self.signal, self.note = values.get("code"), values.get("signal"), str(values.get("note") or "")
            if attempt is None:
                self.note = self.note or "its machine was started again"
            self.attempt = attempt
            if self.is_alive() and attempt is not None:
                self.queue = GpuQueue(self.folder.name, self.folder.spec, self.gpus.listed)
                self.queue.ask(None)
                self.folder.log(f"adopted attempt {attempt.record.number} (pid {attempt.pid})")
        known = self.attempt.tree.members if self.attempt is not None else {}
        left = {p.pid: p for p in tree.with_environment(tree.NODE_RUN, self._mark()) if p.pid not in known}
        if left:
            self.folder.log(
                f"killing what an earlier attempt left: {', '.join(f'{p.name} ({p.pid})' for p in left.values())}"
            )
            tree.kill(Tree("", members=left), self.limits.end.grace_s, self.limits.end.kill_wait_s)


def _state_path(run: Path, order: Order, shared: bool) -> Path | None:
    """Where this node has, or will have, the state to resume from. MonitorError: its name is no name of a state."""
    if not order.resume:
        return None
    if not files.is_state(order.resume):
        raise MonitorError(f"{order.resume!r} is not the name of a checkpoint")
    path = Path(order.resume_path)
    return path if shared and path.is_dir() else run / order.resume


def state_name(node: int) -> str:
    """The file with what must survive the monitor of a node."""
    return f"node-{node}.json"


def folder_of(name: str, node: int) -> Path:
    """The run's folder on this machine, made where the disk is not shared. MonitorError: the number or the name is wrong."""
    if node < 1:
        raise MonitorError(
            f"--rank {node}: the first machine is 0 and runs `python -m monitor run`; number the others from 1"
        )
    try:
        return find(name)
    except MonitorError:
        import runs
        from runs.paths import outputs_dir

        if os.sep in name:
            folder = Path(name).expanduser().absolute()
        else:
            try:
                folder = outputs_dir() / runs.slug(name)
            except runs.RunError as error:
                raise MonitorError(str(error)) from error
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MonitorError(f"{folder} cannot be made: {error.strerror}") from error
        return folder.resolve()


def attend(folder: Path, node: int, leader: str, echo: bool) -> int:
    """Take part in the run in `folder` as machine `node`, until its end; the exit code.

    Raises:
        MonitorError: the address or the secret is missing, or another monitor of this node is there.
    """
    address, token = wire.address_of(leader), wire.token_from(os.environ)
    run_folder, lock = RunFolder(folder, echo, node), Lock(folder / f"node-{node}.lock")
    if not lock.acquire(patience_s=2.0):
        raise MonitorError(f"{folder}: another monitor of node {node} is there")
    try:
        limits = config.load(environ={**os.environ, **guard_limits.of_script("")})
        reply_s = min(limits.nodes.reply_s, max(0.5, limits.nodes.lost_s / 3))
        return Node(run_folder, node, Client(address, token, reply_s), limits).run()
    except (config.ConfigError, guard_limits.LimitError) as error:
        raise MonitorError(str(error)) from error
    finally:
        lock.release()
