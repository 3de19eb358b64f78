"""A training loop that holds only what a supervisor sees: steps of 50 ms, checkpoints, faults. No torch.

    toy_loop.py --output_dir DIR --output_name NAME --max_train_steps N --save_every_n_steps K [--resume STATE]

Decision: one file for every contender of `python -m benchmarks goodput`, so that only the supervisor differs. It
accepts the trainer's flags, so our monitor starts it in place of the trainer through `$TRAINER_PYTHON`; other
launchers start it by path. Without `--resume` it resumes from the newest state that verifies, as a script under
torchrun must do by itself.

Each step hashes the one before, so a run that lost, repeated wrongly or skipped a step ends with a different file.
Events are appended to a ledger (`TOY_LEDGER`), one JSON line each, and every contender is scored from it in the same
way.

    TOY_FAULTS=step_sleeps@47,sigkill@88   each occurs once in the run, when that step is complete
    TOY_FAULTS_DONE=DIR                    one file for each fault that has occurred
    TOY_STEP_S=0.05                        the duration of a step
    TOY_TORCH=1                            import torch first, as trainers do
    TOY_CLIENT=nvrx                        send heartbeats to ft_launcher's rank monitor
"""

from __future__ import annotations

import sys
import time

_BEGUN_S = time.monotonic()

import argparse  # noqa: E402 - the ledger's first line holds the time when the interpreter was ready
import hashlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from guards import checkpoint, crash, gate, snapshot_files, snapshots  # noqa: E402
from guards.heartbeat import REQUEST_STOP, Heartbeat  # noqa: E402
from guards.snapshot_files import File  # noqa: E402
from guards.step_requests import StepRequests  # noqa: E402

WEIGHTS = 1 << 16  # bytes


def log(what: str, step: int, t: float | None = None) -> None:
    """Append an event to the ledger; `t` in monotonic seconds, default now."""
    path = os.environ.get("TOY_LEDGER")
    if path:
        line = {"what": what, "step": step, "t": time.monotonic() if t is None else t, "wall": time.time()}
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, (json.dumps({**line, "pid": os.getpid()}) + "\n").encode())
        os.close(descriptor)


def advance(weights: bytes, step: int) -> bytes:
    """The weights after `step` (from 1), computed from those before."""
    return hashlib.sha256(weights + step.to_bytes(8, "little")).digest()


def to_file(weights: bytes) -> bytes:
    """A safetensors file of one tensor made of the weights."""
    header = json.dumps({"lora": {"dtype": "U8", "shape": [WEIGHTS], "data_offsets": [0, WEIGHTS]}}).encode()
    return len(header).to_bytes(8, "little") + header + hashlib.shake_256(weights).digest(WEIGHTS)


def expected(steps: int) -> bytes:
    """The LoRA of an undisturbed run of `steps`."""
    weights = b""
    for step in range(1, steps + 1):
        weights = advance(weights, step)
    return to_file(weights)


def due(step: int) -> str | None:
    """The fault of this step, once: the next call for the same step returns None."""
    for word in filter(None, os.environ.get("TOY_FAULTS", "").split(",")):
        name, _, at = word.partition("@")
        if int(at) == step:
            try:
                os.close(os.open(Path(os.environ["TOY_FAULTS_DONE"]) / word, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return None
            return name
    return None


def client() -> Callable[[], None]:
    """The function that sends the contender's own heartbeat, for each step."""
    if os.environ.get("TOY_CLIENT") != "nvrx":
        return lambda: None
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    monitor = RankMonitorClient()
    monitor.init_workload_monitoring()
    return monitor.send_heartbeat


def files_of(weights: bytes) -> list[File]:
    """The files of a state."""
    return [File("model.safetensors", "raw", to_file(weights)), File("weights.bin", "raw", weights)]


def save(output: Path, name: str, step: int, weights: bytes, beat: Heartbeat) -> None:
    """Write a guarded state."""
    beat.phase("save")
    with checkpoint.writing(output / f"{name}-step{step:08d}-state", step, 0) as folder:
        for file in files_of(weights):
            (folder / file.name).write_bytes(file.content)
    beat.phase("step")


def main(argv: list[str] | None = None) -> int:
    """Run to the end. Exit code 0; 3 when the monitor requested a stop."""
    begun_s = _BEGUN_S
    if gate.closed():
        if os.environ.get("TOY_TORCH") == "1":
            import torch  # for the time it takes
        argv = gate.wait(sys.argv[1:] if argv is None else argv)
        begun_s = time.monotonic()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--output_name", required=True)
    parser.add_argument("--max_train_steps", type=int, required=True)
    parser.add_argument("--save_every_n_steps", type=int, required=True)
    parser.add_argument("--resume", type=Path)
    args, _ = parser.parse_known_args(argv)
    log("start", 0, begun_s)
    beat = Heartbeat.from_env()
    crash.install(beat)
    if os.environ.get("TOY_TORCH") == "1":
        import torch  # noqa: F401 - for the time it takes
    notify = client()
    beat.phase("load")
    checkpoint.sweep(args.output_dir)
    if args.resume:
        snapshot_files.restore(args.resume)
    state = args.resume or checkpoint.newest_valid(args.output_dir, args.output_name)
    step, weights = 0, b""
    if state is not None:
        guard = checkpoint.guard_of(state)
        assert guard is not None, f"{state} has no guard file"
        step, weights = guard["step"], (state / "weights.bin").read_bytes()
    beat.plan(args.max_train_steps)
    log("resume", step)
    step_s = float(os.environ.get("TOY_STEP_S", "0.05"))
    beat.phase("first_step")
    requests = StepRequests.from_env()
    memory = snapshots.Snapshots.from_env()
    from benchmarks.injector import FAULTS

    while step < args.max_train_steps:
        time.sleep(step_s)
        step += 1
        weights = advance(weights, step)
        beat.step(step, loss=1.0 / step)
        notify()
        log("step", step)
        if step % args.save_every_n_steps == 0:
            save(args.output_dir, args.output_name, step, weights, beat)
        if "state" in requests.pending(step):
            save(args.output_dir, args.output_name, step, weights, beat)
            requests.done("state", step, "a checkpoint")
        if memory.due():
            memory.take(f"{args.output_name}-step{step:08d}-state", step, 0, files_of(weights))
        fault = due(step)
        if fault:
            log(fault, step)
            FAULTS[fault](beat)
        if beat.request == REQUEST_STOP:
            save(args.output_dir, args.output_name, step, weights, beat)
            beat.end("stopped")
            return crash.EXIT_STOPPED
    checkpoint.atomic_write(args.output_dir / f"{args.output_name}.safetensors", to_file(weights))
    log("done", step)
    beat.end("done")
    return 0


if __name__ == "__main__":
    crash.exit_now(main())
