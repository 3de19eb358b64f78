"""`python -m launch rehearse RUN`: does this run train on this machine, how long will it take, and what does it need?

Decision: the run itself is rehearsed, not a model of it. Its script is rendered from its spec with a few numbers
reduced (two steps, one sample, one checkpoint), and the real trainer runs it on the real base model and two of its
images; then the checkpoint is resumed for one more step. What fails at three in the morning fails here, within minutes.
The second image shows what each further one costs. The monitor's own `Loop` watches with its setting `trial`, and never
restarts: what fails is found, explained and killed exactly as in the run itself. It all happens in a data folder of its
own on the same disk, which is removed: the run's outputs are not touched. What a killed process left there is killed
and removed by the next one.

RUN may also be a folder with `run.toml` and `dataset/` (some of its images): the page rehearses a draft that way,
before there is a run. The result is `rehearsal.json` in that folder, replaced at each change, so that whoever reads it
sees the progress. `launch/forecast.py` computes from it when the complete run will end.

A program that goes on, such as the page's server, starts the command as a process: SIGTERM ends it with all it started.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from guards import checkpoint
from launch import forecast
from launch.common import RUN, LaunchError, report
from monitor import supervisor
from monitor.attempt import Attempt
from monitor.loop import Loop
from monitor.process import platform, spawned
from monitor.process.platform import LOCK as WATCHED, Lock, is_held
from monitor.resume.next_attempt import Standby
from monitor.run_folder import RunFolder, read_json
from monitor.state import Observation, State, Transition
from presets.steps import weight_of
from runs import job as jobs, mitigate, scripts
from runs.command import model_files, samples, world
from runs.dataset import counts, images_in
from runs.files import atomic_write, typed
from runs.folders import with_intervals
from runs.manage import size_text
from runs.paths import data_root, datasets_dir, run_folder
from runs.spec import RunSpec, dumps, load, save

FILE, DATASET = "rehearsal.json", "dataset"
SCRATCH, NAME = ".scratch", "rehearsal"  # the data folder in that of the user; the run in it
LOCK = ".scratch.lock"  # held while it is used
STALLED_S = 20.0  # without progress, and with evidence, it hangs
POLL_S, TREE_S = 0.05, 1.0  # between two looks at the run, and at its processes
KILL_S, QUEUE_S = 5.0, 30.0  # for a kill; for the driver to list its GPUs
MEMORY_S = 0.5  # between two readings
IMAGES, STEPS = 2, 2
LIMIT_S = 1800.0  # for all stages
LOG_BYTES, LOG_CHARACTERS = 65536, 3000  # of the log's end: read, and shown
WAITING, RUNNING, DONE, FAILED, SKIPPED = "waiting", "running", "done", "failed", "skipped"
PASSED, CANCELLED, LOST = "passed", "cancelled", "lost"
# stage: (its title, the phases of guards/heartbeat.py that belong to it)
STAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "check": ("Check the settings and files", ()),
    "load": ("Load the model and the images", ("import", "load")),
    "cache": ("Encode images and captions", ("cache_latents", "cache_text", "hash")),
    "train": ("Train two steps", ("first_step", "step", "validate")),
    "sample": ("Draw a sample", ("sample",)),
    "save": ("Save the LoRA and a checkpoint", ("save", "end")),
    "resume": ("Resume from the checkpoint, train one more step", ()),
}
STAGE_OF = {phase: key for key, (_, phases) in STAGES.items() for phase in phases}
# Fields that do not decide whether the run trains here: a change of them does not make a rehearsal out of date.
LENGTH = ("epochs", "max_train_steps", "repeats", "save_every_n_steps", "save_every_n_epochs", "keep_states")
UNTRIED = ("name", "seed", "price_per_hour", "spend_limit", "store", "nodes", "save_dir", *LENGTH)


@dataclass
class Stage:
    """One stage. state: WAITING, RUNNING, DONE, FAILED or SKIPPED. text: what was found, or why it failed."""

    key: str
    title: str
    state: str = WAITING
    took_s: float = 0.0
    text: str = ""


@dataclass
class Rehearsal:
    """A rehearsal as its file holds it. state: RUNNING, PASSED, FAILED or CANCELLED; `read` also returns LOST.

    digest: of the settings that were rehearsed. measured: see `launch/forecast.py`. problem: {"stage", "title", "text",
    "change", "log"}, {} where it passed.
    """

    state: str = RUNNING
    digest: str = ""
    took_s: float = 0.0
    stages: list[Stage] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    problem: dict[str, str] = field(default_factory=dict)
    forecast: dict[str, Any] = field(default_factory=dict)

    def stage(self, key: str) -> Stage:
        """The stage `key` of STAGES."""
        return next(stage for stage in self.stages if stage.key == key)


def digest(spec: RunSpec) -> str:
    """A digest of the settings that decide whether the run trains: not its name, its length, its price."""
    kept = {key: value for key, value in spec.public().items() if key not in UNTRIED}
    if edited := kept.pop("edited", None):
        kept["script"] = edited["script"].replace(spec.slug, "RUN")
    kept["samples"] = bool(kept.pop("sample_every_n_steps") != 0)
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:32]


def read(folder: Path) -> Rehearsal | None:
    """The last rehearsal of the run in `folder`; None when there was none. One whose process is gone is LOST."""
    if not (folder / FILE).exists():
        return None
    try:
        found: Rehearsal = typed(Rehearsal, read_json(folder / FILE))
    except (TypeError, ValueError):
        return Rehearsal(LOST)
    lost = found.state == RUNNING and not is_held(data_root() / LOCK)
    return replace(found, state=LOST) if lost else found


def objection(folder: Path, spec: RunSpec) -> str:
    """Why the run should not be started unasked: its last rehearsal failed with these settings. "" for no objection."""
    found = read(folder)
    tried = found is not None and FAILED in {stage.state for stage in found.stages}
    if found is None or not tried or found.state != FAILED or found.digest != digest(spec):
        return ""
    return f"The rehearsal failed at “{found.problem['stage']}”: {found.problem['title'].rstrip('.')}."


def hand_on(source: Path, folder: Path) -> None:
    """Keep a draft's rehearsal with the run that was made from it, where that has the settings that were rehearsed."""
    found = read(source)
    if found is not None and found.state in (PASSED, FAILED) and found.digest == digest(load(folder)):
        _write(folder, found)


def _write(folder: Path, found: Rehearsal) -> None:
    atomic_write(folder / FILE, json.dumps(asdict(found), ensure_ascii=False))


def rehearse(folder: Path, limit_s: float = LIMIT_S) -> Rehearsal:
    """Rehearse the run in `folder`, and print its stages. Call it in a process of its own: it changes HANGPROOF_DATA.

    Raises LaunchError: it cannot be tried (a GPU is in use, no images). runs.files.RunError: the run is wrong.
    """
    made = jobs.load(folder)
    spec = made.run_spec() if made else load(folder)
    own = folder / DATASET
    source = own if own.is_dir() else datasets_dir() / spec.slug
    pictures = images_in(source)
    if not pictures:
        raise LaunchError(f"{source} has no images; add some, then rehearse the run")
    stages = [Stage(key, title) for key, (title, _) in STAGES.items()]
    found = Rehearsal(digest=digest(spec), stages=stages)
    began_s, files = time.monotonic(), model_files(spec)
    with scratch() as run:
        _write(folder, found)
        try:
            Work(folder, found, began_s + limit_s, run).rehearse(_reduced(spec, files, pictures[:IMAGES], source))
            found.state = FAILED if found.problem else PASSED
            if source is not own:  # of a draft, the page knows how many images there are
                found.forecast = forecast.of(found.measured, spec, counts(source), captions_of(pictures))
        except (SystemExit, KeyboardInterrupt):
            found.state = CANCELLED
            raise
        except BaseException as error:  # what cannot be tried is a result too, for whoever reads only the file
            found.state = FAILED
            title = "It could not be tried"
            found.problem = {"stage": "Start", "title": title, "text": str(error), "change": "", "log": ""}
            raise
        finally:
            found.took_s = round(time.monotonic() - began_s, 1)
            for stage in found.stages:
                if stage.state in (WAITING, RUNNING):
                    stage.state = SKIPPED
            if folder.is_dir():
                _write(folder, found)
    return found


def captions_of(images: list[Path]) -> list[str]:
    """The caption of the first image, which is the sample prompt where there is no other."""
    texts = filter(Path.is_file, (path.with_suffix(".txt") for path in images[:1]))
    return [text.read_text(encoding="utf-8", errors="replace") for text in texts]


def _reduced(spec: RunSpec, files: Mapping[str, str], images: list[Path], source: Path) -> RunSpec:
    """The spec of the first attempt, with its images in place: the same settings, two steps on one machine, a sample,
    a checkpoint. Nothing is uploaded or copied to a store."""
    data, control = datasets_dir() / NAME, datasets_dir().parent / "control"
    for number, path in enumerate(images):
        copy = data / f"{number}-{path.name}"
        data.mkdir(parents=True, exist_ok=True)
        for file in filter(Path.is_file, (path, path.with_suffix(".txt"))):
            shutil.copyfile(file, copy.with_suffix(file.suffix))
        if spec.control_dir:
            inside = Path(spec.control_dir).expanduser().absolute() / weight_of(str(path.parent.relative_to(source)))[1]
            control.mkdir(exist_ok=True)
            for file in inside.iterdir() if inside.is_dir() else ():
                if file.stem == path.stem:
                    shutil.copyfile(file, control / f"{copy.stem}{file.suffix}")
    prompts = samples(with_intervals(spec, {"": len(images)}, captions_of(images)))[:1]
    left = ("sample_every_n_epochs", "sample_at_first", "save_every_n_epochs", "save_state_to_huggingface")
    kept = {flag: v for flag, v in spec.extra.items() if flag not in left and not flag.startswith("huggingface_")}
    return spec.changed(
        name=NAME, nodes=1, max_train_steps=STEPS, save_every_n_epochs=0, save_dir="", store="", spend_limit=0.0,
        extra={**files, **kept}, control_dir=str(control) if spec.control_dir else "", prompts=prompts,
        save_every_n_steps=STEPS, keep_states=max(2, spec.keep_states), sample_every_n_steps=STEPS if prompts else 0,
        # Each image fills all batches of all steps, also alone in its bucket.
        repeats=(STEPS + 1) * spec.batch_size * spec.gradient_accumulation * world(spec),
        trackers="" if spec.trackers == "trackio" else spec.trackers,  # which the monitor would start
    )  # fmt: skip


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """The folder of the run to try, in a data folder that HANGPROOF_DATA names meanwhile. LaunchError: it is in use."""
    root, models, before = data_root() / SCRATCH, data_root() / "models.toml", os.environ.get("HANGPROOF_DATA")
    run = root / "outputs" / NAME
    lock, watched = Lock(data_root() / LOCK), Lock(run / WATCHED)
    if not lock.acquire():
        raise LaunchError("another run is being rehearsed; try again when that has ended")
    try:
        clear(run)
        watched.acquire()  # else its trainer would count as one that nobody watches
        if models.is_file():
            shutil.copyfile(models, root / "models.toml")
        os.environ["HANGPROOF_DATA"] = str(root)
        yield run
    finally:
        os.environ.pop("HANGPROOF_DATA", None)
        os.environ |= {"HANGPROOF_DATA": before} if before is not None else {}
        watched.release()
        clear(run)
        lock.release()


def clear(run: Path) -> None:
    """Kill what still trains in the scratch folder, and remove it."""
    left = {process.pid: process for process in spawned.with_environment(spawned.RUN, str(run))}
    spawned.kill(spawned.Tree("", members=left), 0.0, KILL_S)
    shutil.rmtree(run.parent.parent, ignore_errors=True)


class Trial:
    """An attempt, until it completes, fails or its time is over. `loop`: its monitor, with the evidence of a failure.

    busy: why it was not tried, such as a GPU that another run has. memory: host_bytes and, with a GPU, values that
    begin with gpu, at their peak. intervals: seconds of the last steps.
    """

    def __init__(self, run: Path, until_s: float, on_phase: Callable[[str, float], None]):
        """until_s: when its time is over. on_phase: called with each phase of the first rank, and when (monotonic)."""
        self.loop = loop = Loop(RunFolder(run), self._turn, trial=True)
        config, loop.on_view = loop.config, self._measure
        for phase in config.phases.values():
            phase.floor_s = phase.ceiling_s = STALLED_S
        config.watch.poll_min_s, config.watch.poll_max_s, config.watch.tree_s = POLL_S, POLL_S, TREE_S
        config.end.grace_s, config.end.kill_wait_s = 0.0, KILL_S
        config.restart.snapshots_bytes = config.restart.in_all_count = config.standby.tries_count = 0
        loop.standby = Standby(loop)
        self.until_s, self._on_phase = until_s, on_phase
        self.busy = ""
        self.memory: dict[str, Any] = {}
        self.intervals: tuple[float, ...] = ()
        self._began_s = time.monotonic()
        self._memory_s = 0.0
        self._entered: tuple[int, str] = (0, "")
        self._items: dict[tuple[int, str], list[tuple[int, float]]] = {}

    def _turn(self, loop: Loop) -> Transition:
        """A turn of the monitor, while there is time. It starts at once, or not at all."""
        now_s, queue = time.monotonic(), loop.queue
        if now_s >= self.until_s:
            return Transition(State.FAILED, "It was still working when its time was over.")
        if loop.at.state is State.QUEUED and not queue.acquire() and now_s - self._began_s > QUEUE_S:
            self.busy = f"{queue.message}; try again when it is free"
            return Transition(State.FAILED, self.busy)
        started, result = loop.attempt is None, supervisor.turn(loop)
        if started and loop.attempt is not None:
            self._on_phase("import", time.monotonic())
        return result

    def _measure(self, attempt: Attempt, view: Observation) -> None:
        """What each observation of the attempt shows."""
        if view.now_s - self._memory_s >= MEMORY_S:
            self._memory_s = view.now_s
            memory, used = self.memory, platform.private_bytes(*attempt.tree.members)
            memory["host_bytes"] = max(memory.get("host_bytes", 0), used)
            for gpu in self.loop.gpus.read():
                used, total = int(gpu.get("memory_used") or 0), int(gpu.get("memory_total") or 0)
                # In a container the driver names no process, or those of another namespace: all memory in use counts.
                memory.setdefault("gpu_before_bytes", used)
                if used > memory.get("gpu_bytes", 0):
                    memory |= {"gpu_bytes": used, "gpu_total_bytes": total, "gpu": str(gpu.get("name", ""))}
        first = next((beat for beat in view.beats if beat.rank == 0), None)
        if first is None:
            return
        items = self._items.setdefault((first.pid, first.phase), [])
        if first.done and (not items or items[-1][0] != first.done):
            items.append((first.done, first.beat_s))
        self.intervals = first.intervals or self.intervals
        if (first.pid, first.phase) != self._entered:
            same = first.pid == self._entered[0]
            self._entered = (first.pid, first.phase)
            self._on_phase(first.phase, first.phase_s if same else view.now_s)

    def image_s(self) -> float:
        """Seconds that each further image costs: from the first item to the last one, in each phase that encodes."""
        visits = [items for (_, phase), items in self._items.items() if STAGE_OF.get(phase) == "cache" and items]
        spans = [(items[-1][1] - items[0][1], items[-1][0] - items[0][0]) for items in visits]
        return round(sum(seconds / count for seconds, count in spans if count > 0), 4)


class Work:
    """A rehearsal under way in the folder `run`: follows the phases of the trainer, and measures."""

    def __init__(self, folder: Path, found: Rehearsal, until_s: float, run: Path):
        self.folder, self.found, self.until_s, self.run = folder, found, until_s, run
        self.now: Stage | None = None
        self._since_s = 0.0

    def rehearse(self, spec: RunSpec) -> None:
        """Run all stages; the first that fails ends it."""
        self._enter("check")
        trial = self._try(spec)
        if trial is not None and self._measure(spec, trial):
            self._enter("resume")
            resumed = self._try(spec.changed(max_train_steps=STEPS + 1, sample_every_n_steps=0, prompts=[]))
            if resumed is None:
                return
            first, last = resumed.loop.state.resumed_step, resumed.loop.state.best_step
            if (first, last) != (STEPS, STEPS + 1):
                text = f"It trained from step {first} to {last}; steps {STEPS} to {STEPS + 1} were expected."
                self._fail("resume", "The checkpoint was not continued", text, "")

    def _try(self, spec: RunSpec) -> Trial | None:
        """The attempt once it has trained to its end; None where it failed, which is then the result."""
        save(self.run, spec)
        scripts.write(self.run, jobs.made(self._job(spec), dumps(spec).encode()))
        trial = Trial(self.run, self.until_s, self._on_phase)
        try:
            trial.loop.run_until_final()
        finally:  # nothing of the attempt lives on
            if trial.loop.attempt is not None:
                trial.loop.attempt.kill(0.0, KILL_S)
                trial.loop.attempt.close()
        if trial.busy:
            raise LaunchError(trial.busy)
        if trial.loop.at.state is not State.COMPLETED:
            self._explain(spec, trial)
            return None
        self._enter(None)
        return trial

    def _job(self, spec: RunSpec) -> jobs.Job:
        """The job of the rehearsal: that of the run, where it has one, with the few steps and images of `spec`."""
        job, own = jobs.resolve(spec, self.run), jobs.load(self.folder)
        if own is None:
            return job
        patch = jobs.difference(jobs.resolve(own.run_spec(), self.folder), job)
        return replace(own.patched(patch), dataset=job.dataset, platform=job.platform, places=job.places)

    def _measure(self, spec: RunSpec, trial: Trial) -> bool:
        """Keep what the first attempt took; False where it left no checkpoint or sample, which is then the result."""
        run, data, silent = self.run, datasets_dir() / NAME, "The trainer reported no error."
        state, drawn = checkpoint.newest_valid(run, NAME), [*(run / "sample").glob("*")]
        if state is None:
            return self._fail("save", "No checkpoint was saved", silent, "")
        if spec.sample_every_n_steps and not drawn:
            return self._fail("sample", "No sample was drawn", silent, "")
        caches = [*data.rglob("*.npz"), *data.rglob("*.safetensors"), *(run / "cache").rglob("*")]
        steps, states = trial.intervals, max(1, len(checkpoint.states(run, NAME)))
        took_s = {stage.key: stage.took_s or POLL_S for stage in self.found.stages}  # too short to be seen: one look
        self.found.measured = measured = {
            "load_s": took_s["load"], "cache_s": took_s["cache"],
            "image_s": trial.image_s(), "step_s": steps[-1] if steps else 0.0,
            "sample_s": took_s["sample"] if drawn else None, "save_s": took_s["save"] / states,
            "state_bytes": _bytes(*state.rglob("*")), "lora_bytes": _bytes(run / f"{NAME}.safetensors"),
            "cache_bytes": _bytes(*caches), "images": len(images_in(data)), **trial.memory,
        }  # fmt: skip
        self.found.stage("train").text = f"{measured['step_s']:.3g} s for the second step"
        lora, state_size = (size_text(measured[key]) for key in ("lora_bytes", "state_bytes"))
        self.found.stage("save").text = f"LoRA {lora}, checkpoint {state_size}"
        if not drawn:
            self.found.stage("sample").state, self.found.stage("sample").text = SKIPPED, "Samples are off in this run"
        return True

    def _explain(self, spec: RunSpec, trial: Trial) -> None:
        """Why the attempt did not complete, as its monitor found."""
        now, incident = self.now.key if self.now else "check", trial.loop.incident
        if incident is None and trial.loop.attempt is None:
            self._fail(now, "It cannot be started", trial.loop.at.message, "Correct this, then rehearse again.")
        elif incident is None:
            title = "It took too long" if time.monotonic() >= self.until_s else "It ended early"
            self._fail(now, title, trial.loop.at.message, "Read the end of the log below.")
        else:
            cause, evidence = incident.cause, incident.evidence
            said = evidence.group().verdict().text if evidence.kind == "hang" else ""
            stage = now if now == "resume" else STAGE_OF.get(evidence.phase, "load")
            text = " ".join(filter(None, (cause.explanation, said)))
            setting = next(filter(None, (mitigate.apply(spec, name)[1] for name in cause.ladder)), "")
            advice = " ".join(filter(None, (cause.advice, setting and f"Change this setting: {setting}.")))
            self._fail(stage, cause.title, text, advice or "Read the end of the log below.")

    def _fail(self, stage: str, title: str, text: str, change: str) -> bool:
        self._enter(None)
        failed = self.found.stage(stage)
        failed.state, failed.text = FAILED, title
        for later in self.found.stages[self.found.stages.index(failed) + 1 :]:
            later.state = SKIPPED
        log = RunFolder(self.run).log_tail(0, LOG_BYTES).replace("\r", "\n")
        tail = "\n".join(line for line in log.splitlines() if line.strip())[-LOG_CHARACTERS:]
        self.found.problem = {"stage": failed.title, "title": title, "text": text, "change": change, "log": tail}
        self._tell(failed)
        return False

    def _on_phase(self, phase: str, at_s: float) -> None:
        if self.now is None or self.now.key != "resume":
            self._enter(STAGE_OF.get(phase, "load"), at_s)

    def _enter(self, key: str | None, at_s: float | None = None) -> None:
        """The stage `key` began at `at_s` (monotonic; default: now), the one before ends. musubi-tuner loads twice."""
        before, at_s = self.now, time.monotonic() if at_s is None else at_s
        if before is not None:
            if before.key == key:
                return
            before.took_s = round(before.took_s + max(0.0, at_s - self._since_s), 4)
            before.state = DONE
        self.now, self._since_s = (self.found.stage(key) if key else None), at_s
        if self.now is not None:
            self.now.state = RUNNING
            for earlier in self.found.stages[: self.found.stages.index(self.now)]:
                if earlier.state == WAITING:  # too short to be seen
                    earlier.state = DONE
        for changed in filter(None, (before, self.now)):
            self._tell(changed)

    def _tell(self, stage: Stage) -> None:
        """Print a stage that begins or has ended, and keep the result as it is."""
        if stage.state == RUNNING:
            print(f"{stage.title} …", flush=True)
        elif stage.state in (DONE, FAILED):
            print(f"{stage.title}: {stage.state}, {stage.took_s:.1f} s", flush=True)
        with contextlib.suppress(OSError):  # a full disk, or the draft was deleted: the rehearsal says so at its end
            _write(self.folder, self.found)


def _bytes(*paths: Path) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


OPTIONS = (RUN, ("--limit S", LIMIT_S, f"seconds for all stages (default: {LIMIT_S:.0f})"))


def run(args: argparse.Namespace) -> int:
    """Exit code 0: it passed. 1: it failed; the text says where and why."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started is killed, too
    if not args.limit > 0:  # nor NaN
        raise LaunchError("--limit must be a number of seconds")
    found = rehearse(run_folder(args.run), args.limit)
    lines, why = forecast.lines(found.forecast), found.problem
    if why:
        head = f"Failed at “{why['stage']}”: {why['title'].rstrip('.')}."
        lines = [head, *filter(None, (why["text"], why["change"]))]
    report(args, "\n".join(["", *lines]), asdict(found))
    return 0 if found.state == PASSED else 1
