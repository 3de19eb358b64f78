"""Says whether this machine and its trainers are ready, before 24 GB are downloaded.

    ./start.sh doctor [--quick] [--json]

Each line is a fact and, where something is wrong, what to do. For each trainer of kohya's that is installed, a
script is started with the guards as far as its help, which imports all that a training needs: up to half a minute each.
--quick leaves that out. What can block for ever (a driver, an import of torch) runs in a process of its own with a
limit. Nothing is changed or left behind. The page's tab "Doctor" shows the same lines, from `--quick --json`.

Exit code 0 when nothing failed, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from guards import shell
from monitor.process import platform, spawned
from presets import lint, terminal
from runs.machine import ask, this_machine
from runs.paths import ROOT, START, data_root, datasets_dir, models_dir, outputs_dir, venv_program
from sd_scripts_patches import install, versions
from sd_scripts_patches.trainers import CUDA, CUDA_INDEX, TRAINERS, Trainer

OK, NOTE, FAILED = "ok", "note", "failed"
LEAST_DISK_GB = 40  # the files of FLUX.1 take 34 GB
# Docker gives a container 64 MB (docs.docker.com/reference/cli/docker/container/run, --shm-size)
LEAST_SHM_BYTES = 1 << 30
DISK_BYTES, DISK_S = 64 << 20, 20.0
SLOW_MB_S, SLOW_FSYNC_S = 50.0, 0.5
VERSIONS_S = 90.0  # a first import of torch from a slow disk
# In the trainer's own interpreter, from nothing of ours; -I: no PYTHONPATH, no current folder
ASK_VERSIONS = """
import importlib.metadata as m, json, multiprocessing, platform, sys
found = {"python": platform.python_version(), "start": multiprocessing.get_start_method()}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
try:
    import torch
    found |= {"torch": torch.__version__, "cuda_build": torch.version.cuda or "", "cuda": torch.cuda.is_available()}
    if found["cuda"]:
        found |= {"devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
                  "bf16": torch.cuda.is_bf16_supported()}
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"[:300]
print(json.dumps(found))
"""
ASK_DRIVER = """
import json, pynvml as n
from monitor.gpu import take
n.nvmlInit()
version = n.nvmlSystemGetCudaDriverVersion_v2()
cuda = f"{version // 1000}.{version % 1000 // 10}"
print(json.dumps({"driver": n.nvmlSystemGetDriverVersion(), "cuda": cuda, "gpus": take(n)}))
"""
MEASURE = """
import json, pathlib, sys, doctor
try:
    print(json.dumps(doctor.measure_disk(pathlib.Path(sys.argv[1]))))
except OSError as error:
    sys.exit(f"it cannot be used: {error.strerror or error}")
"""
PACKAGES = ("accelerate", "diffusers", "transformers", "peft", "xformers", "bitsandbytes")
CHECK_S = 120


def findings(quick: bool) -> Iterator[Finding]:
    """Yield each finding as it is known."""
    yield Finding("Python", OK, f"{'.'.join(map(str, sys.version_info[:3]))} in {sys.prefix}")
    for check in (gpu, memory, folders):
        yield from check()
    yield from python_versions("built-in trainer", Path(sys.executable), f"Delete {ROOT / '.venv'} and run {START}.")
    yield from left_over()
    for trainer in TRAINERS.values():
        yield from installed(trainer, quick)


def left_over() -> Iterator[Finding]:
    """Trainers that nobody watches."""
    try:
        found = spawned.orphans()
    except OSError as error:
        yield Finding("left-over trainers", NOTE, f"the processes could not be listed: {error.strerror}")
        return
    if not found:
        yield Finding("left-over trainers", OK, "no trainer runs without a monitor")
    for sentence in found:
        yield Finding("left-over trainers", NOTE, sentence)


def installed(trainer: Trainer, quick: bool) -> Iterator[Finding]:
    """The checkout of a trainer, its guards, its environment, and whether it starts."""
    name, command = trainer.name, f"{START} {trainer.key}"
    if not trainer.checkout.is_dir():
        yield Finding(name, NOTE, f"not installed; {command} installs {trainer.version}")
        return
    now = versions.commit(trainer.checkout)
    known = "the pinned one" if now == trainer.commit else "tested" if now in trainer.tested else "not tested"
    where = f"{trainer.checkout}, commit {now[:8] or 'unknown'} ({known})"
    action = f"To get the pinned one, move this folder away and run {command}." if known == "not tested" else ""
    yield looked_at(name, where, action)
    if not trainer.environment.is_dir():
        yield Finding(name, FAILED, f"its environment {trainer.environment} is missing", f"Run {command}.")
        return
    yield from guards(trainer)
    again = f"Delete {trainer.environment} and run {command}."
    yield from python_versions(name, venv_program(trainer.environment, "python"), again)
    if not quick:
        yield start(trainer, again)


def guards(trainer: Trainer) -> Iterator[Finding]:
    """Whether every guard finds its place in the checkout."""
    name, again = f"{trainer.name} guards", f"Run python -m sd_scripts_patches check {shell.word(trainer.checkout)}"
    result = ask([*spawned.python("sd_scripts_patches", "check"), trainer.checkout, "--json"], CHECK_S)
    if isinstance(result, str):
        yield Finding(name, FAILED, f"they could not be checked: {result}", again)
    elif result["ok"]:
        yield Finding(name, OK, f"all {len(result['patches'])} are compatible with this checkout")
    else:
        yield Finding(name, FAILED, "not all of them are compatible with this checkout", again)


def start(trainer: Trainer, again: str) -> Finding:
    """Whether a training script of the trainer starts. again: how to install it again."""
    name = f"{trainer.name} start"
    print(f"{name}: importing its libraries …", file=sys.stderr, flush=True)
    if failed := install.starts(trainer.checkout, trainer.environment, trainer):
        return Finding(name, FAILED, failed, again)
    return Finding(name, OK, f"{trainer.script} and its libraries can be imported, with the guards")


@dataclass(frozen=True)
class Finding:
    """One line. status: OK, NOTE (a warning) or FAILED (a problem). action: what to do, "" when nothing is wrong."""

    name: str
    status: str
    text: str
    action: str = ""


def looked_at(name: str, text: str, action: str) -> Finding:
    """A fact: a warning where there is something to do."""
    return Finding(name, NOTE if action else OK, text, action)


def python_versions(name: str, python: Path, again: str) -> Iterator[Finding]:
    """Python, torch and CUDA of an environment, and how its workers start. again: how to install it again."""
    found = ask([python, "-I", "-c", ASK_VERSIONS, *PACKAGES], VERSIONS_S)
    if isinstance(found, str):
        yield Finding(f"{name} Python", FAILED, f"{python}: {found}", again)
        return
    packages = ", ".join(f"{key} {found[key]}" for key in PACKAGES if key in found)
    yield Finding(f"{name} Python", OK, f"{found['python']}; {packages}")
    if "error" in found or "torch" not in found:
        yield Finding(f"{name} PyTorch", FAILED, found.get("error", "PyTorch is not installed"), again)
        return
    built = f"built for CUDA {found['cuda_build']}" if found["cuda_build"] else "built for the processor only"
    text = f"{found['torch']}, {built}"
    if found["cuda"]:
        bf16 = "" if found.get("bf16") else ", without bf16"
        yield Finding(f"{name} PyTorch", OK, f"{text}; it sees {', '.join(found['devices'])}{bf16}")
    elif this_machine().vram_gb:
        build = f"torch=={found['torch'].partition('+')[0]}+{CUDA}"
        fix = f"Run {python} -m pip install --extra-index-url {CUDA_INDEX} {build}"
        if found["cuda_build"]:
            fix = "Update the GPU driver, then restart the machine."
        yield Finding(f"{name} PyTorch", FAILED, f"{text}; it cannot use the GPU", fix)
    else:
        yield Finding(f"{name} PyTorch", OK, f"{text}; no GPU is there to use")
    hint = "; the guards start loader workers before CUDA is used" if found["start"] == "fork" else ""
    yield Finding(f"{name} workers", OK, f"loader workers start by “{found['start']}”{hint}")


def gpu() -> Iterator[Finding]:
    """The driver and the GPUs with their memory."""
    here = this_machine()
    if here.note:
        yield Finding("GPU", FAILED, here.note, "Fix the driver, then run this again.")
    elif here.vram_gb:
        yield Finding("GPU", OK, f"{here.gpu_name}, {here.vram_gb:g} GB")
    else:
        text = "no NVIDIA GPU found: only the toy model can be trained on this machine"
        if sys.platform == "darwin":
            text = "an Apple GPU (MPS): the built-in trainer uses it, without quantized weights"
        yield Finding("GPU", NOTE, text)
    if not here.vram_gb:
        return
    found = ask([sys.executable, "-c", ASK_DRIVER], 20.0)
    if isinstance(found, str):
        fix = "Restart the machine. If that does not help, install the driver again."
        yield Finding("GPU driver", FAILED, found, fix)
        return
    yield Finding("GPU driver", OK, f"{found['driver']}, for CUDA up to {found['cuda']}")
    for index, one in enumerate(found["gpus"]):
        text, action, used, total = one.get("name", "GPU"), "", one.get("memory_used"), one.get("memory_total", 0)
        if used is not None:  # GB10 and Jetson have no memory of their own
            text += f": {used / 2**30:.1f} of {total / 2**30:.1f} GB in use"
            action = "Close other programs that use this GPU before you train." if used > 0.2 * total else ""
        yield looked_at(f"GPU {index}", text, action)


def memory() -> Iterator[Finding]:
    """The machine's memory, and the shared memory that loader workers pass images through."""
    import psutil

    now = psutil.virtual_memory()
    text = f"{now.available / 1e9:.1f} of {now.total / 1e9:.1f} GB available"
    yield looked_at("memory", text, "Close other programs before you train." if now.available < 4e9 else "")
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return
    usage = shutil.disk_usage(shm)
    little = usage.free < LEAST_SHM_BYTES
    text = f"/dev/shm has {usage.free / 1e9:.2f} of {usage.total / 1e9:.2f} GB free" + ", which is little" * little
    fix = "Loader workers pass images through it. Start the container with --shm-size 2g, or use 0 data loader workers."
    yield looked_at("shared memory", text, fix if little else "")


def folders() -> Iterator[Finding]:
    """The disk of the data folders: free space, kind of file system, speed; and the folder for temporary files."""
    here = this_machine()
    low, disk = here.free_disk_gb < LEAST_DISK_GB, f"{here.free_disk_gb:.0f} GB free in {data_root()}"
    needs = f"; large base models with their checkpoints need {LEAST_DISK_GB} GB and more" if low else ""
    fix = "Free some disk space, or set HANGPROOF_DATA to a folder on a larger disk."
    yield looked_at("disk", disk + needs, fix if low else "")
    disks_seen: dict[int, tuple[str, Path]] = {}  # by device
    for name, folder in (("runs", outputs_dir()), ("data sets", datasets_dir()), ("models", models_dir())):
        place = next(path for path in (folder, *folder.parents) if path.exists())
        disks_seen.setdefault(place.stat().st_dev, (name, place))
    for name, place in disks_seen.values():
        yield from file_system(name, place)
        yield disk_speed(name, place)


def file_system(name: str, folder: Path) -> Iterator[Finding]:
    """The kind of file system that a folder is on."""
    kind, mount = lint.file_system(folder.resolve())
    if lint.NETWORK.fullmatch(kind):
        fix = "A network disk can stall for minutes. Keep images on a local one, and set save_dir to a local folder."
        where = f"{folder} is on a network file system ({kind}, at {mount})"
        yield Finding(f"file system of {name}", NOTE, where, fix)
    elif kind:
        yield Finding(f"file system of {name}", OK, f"{kind}, at {mount}")


def disk_speed(name: str, folder: Path) -> Finding:
    """How fast the disk of a folder writes, reads and flushes; asked of a process, because a dead disk blocks for ever."""
    title = f"disk speed of {name}"
    found = ask([sys.executable, "-c", MEASURE, folder], DISK_S * 2)
    if isinstance(found, str):
        fix = "Check this disk (dmesg, smartctl), or set HANGPROOF_DATA to a folder on another one."
        return Finding(title, FAILED, f"{folder}: {found}", fix)
    text = f"writes {found['write_mb_s']:.0f} MB/s, reads {found['read_mb_s']:.0f} MB/s, flushes a small file in {found['fsync_s'] * 1000:.0f} ms"
    slow = min(found["write_mb_s"], found["read_mb_s"]) < SLOW_MB_S or found["fsync_s"] > SLOW_FSYNC_S
    fix = "Loading a model and saving checkpoints will take long. Use a faster disk (HANGPROOF_DATA)." if slow else ""
    return looked_at(title, text, fix)


def measure_disk(folder: Path) -> dict[str, float]:
    """{"write_mb_s", "read_mb_s", "fsync_s"} of a folder's disk, with 64 MB at most and for a few seconds.

    Raises OSError: it cannot be written, or has no file locks.
    """
    block, written, began_s = os.urandom(4 << 20), 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as place:
        path, lock = Path(place, "speed"), platform.Lock(Path(place, "lock"))
        lock.acquire()
        lock.release()
        with path.open("wb") as file:
            while written < DISK_BYTES and time.monotonic() - began_s < DISK_S / 2:
                file.write(block)
                written += len(block)
            file.flush()
            os.fsync(file.fileno())
        write_s = time.monotonic() - began_s
        began_s, read = time.monotonic(), 0
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):  # not from memory, as far as the kernel agrees
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while chunk := file.read(len(block)):
                read += len(chunk)
        read_s = time.monotonic() - began_s
        waits = []
        for number in range(5):
            began_s = time.monotonic()
            with Path(place, f"small-{number}").open("wb") as file:
                file.write(b"x" * 4096)
                file.flush()
                os.fsync(file.fileno())
            waits.append(time.monotonic() - began_s)
    return {
        "write_mb_s": written / 1e6 / max(write_s, 1e-6), "read_mb_s": read / 1e6 / max(read_s, 1e-6),
        "fsync_s": sorted(waits)[2],
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Print the findings, or with --json one line of JSON."""
    parser = argparse.ArgumentParser(prog="./start.sh doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="do not start the trainers")
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    options = parser.parse_args(argv)
    found = []
    for finding in findings(options.quick):
        found.append(finding)
        if not options.json:
            print(f"{finding.status:<7} {finding.name}: {finding.text}", flush=True)
            if finding.action:
                print(f"{'':<7} → {finding.action}", flush=True)
    failed = [finding.name for finding in found if finding.status == FAILED]
    if options.json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in found]}))
    else:
        print(f"\nFix first: {', '.join(failed)}." if failed else "\nReady.")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(terminal.command(main))
