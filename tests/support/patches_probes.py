"""Small programs that hang, each in one known way: tests/upstream/test_hangs.py runs them under the launcher.

A program writes `HANG` and its clock when it starts to hang. Each line is written in one call: loader workers write to the
same pipe, and `print` writes in pieces that would mix with theirs.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy
import patches_helpers as helpers
import tiny_sd_scripts as tiny
from ui_helpers import free_port

LOADER = """
import os, signal, sys, time
import torch.utils.data

def write(text):
    os.write(1, (text + "\\n").encode())

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, i):
        if i == BAD:
            write(f"HANG {time.monotonic()} pid {os.getpid()}")
            FAULT
        return torch.full((300, 300), float(i))

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Data(), num_workers=int(sys.argv[1]))
    write(f"loader timeout {loader.timeout}")
    KEPT
    for n, batch in enumerate(kept):
        write(f"got {n}")
        AFTER
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
SLOW_EXIT = "import multiprocessing.util; multiprocessing.util.Finalize(None, time.sleep, (3600,), exitpriority=100)"
POOL = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
ThreadPoolExecutor(1).submit(time.sleep, 3600)
os.write(1, f"HANG {time.monotonic()}\\n".encode())
if sys.argv[1] == "fail":
    raise ValueError("the error of the script")
"""
SWAP = """
import os, sys, time
import torch
from library.custom_offloading_utils import ModelOffloader

class Stuck(ModelOffloader):
    def swap_weight_devices(self, a, b):
        os.write(1, f"HANG {time.monotonic()}\\n".encode())
        time.sleep(3600)

blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(4))
offloader = Stuck(blocks, 1, torch.device("cpu"), supports_backward=True)
if sys.argv[1] == "wait_for_block":
    offloader.submit_move_blocks(blocks, 0)
    offloader.wait_for_block(3)
elif sys.argv[1] == "set_forward_only":
    offloader.submit_move_blocks(blocks, 0)
    offloader.set_forward_only(True)
else:
    x = torch.ones(1, 2, requires_grad=True)
    for block in blocks:
        x = block(x)
    x.sum().backward()
"""
NPZ = """
import os, time
from library.strategy_base import LatentsCachingStrategy
os.write(1, f"HANG {time.monotonic()}\\n".encode())
LatentsCachingStrategy(True, 1, False)._default_load_latents_from_disk(None, os.environ["CACHE"], (64, 64))
"""
TRACKER = """
import argparse, os, sys, time
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker
from library import train_util

def never(self, *args, **kwargs):
    os.write(1, f"HANG {time.monotonic()}\\n".encode())
    time.sleep(3600)

where, how = sys.argv[1:3]
setattr(TensorBoardTracker, where, never)
accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=sys.argv[3])
args = argparse.Namespace(wandb_run_name=None, log_tracker_config=None, log_tracker_name=None, log_config=False)
train_util.init_trackers(accelerator, args, "run")
for step in range(3):
    accelerator.log({"loss": 0.5}, step=step)
print("trained", flush=True)
if how == "fail":
    raise ValueError("the error of the script")
accelerator.end_training()
"""
FORK = """
import multiprocessing as mp, torch
torch.cuda.is_initialized = lambda: True
if __name__ == '__main__':
    print(list(torch.utils.data.DataLoader([1, 2], num_workers=1)))
    mp.get_context('fork').Process(target=print, name='map of a data set').start()
"""
BARRIER = """
import os, time
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
accelerator.wait_for_everyone()
print("met once", flush=True)
os.write(1, f"HANG {time.monotonic()}\\n".encode())
if accelerator.process_index == 1:
    time.sleep(3600)
accelerator.wait_for_everyone()
"""
BAD_FORK = "import torch\ntorch.cuda._is_in_bad_fork = lambda: True\ntorch.zeros(1, device='cuda')\n"


def loader(fault: str, bad: int = 4, after: str = "pass", kept: str = "kept = loader") -> str:
    """Return LOADER with its placeholders filled in."""
    source = LOADER
    for name, text in {"FAULT": fault, "BAD": str(bad), "KEPT": kept, "AFTER": after}.items():
        source = source.replace(name, text)
    return source


@contextlib.contextmanager
def fifo(folder: Path):
    """A cache file that opens and never returns data."""
    os.mkfifo(folder / "x.npz")
    yield {"CACHE": str(folder / "x.npz")}


def damaged(spoil: Callable[[bytes], bytes]):
    @contextlib.contextmanager
    def around(folder: Path):
        path = folder / "x.npz"
        numpy.savez(path, latents=numpy.zeros((16, 8, 8)), original_size=[64, 64], crop_ltrb=[0, 0, 64, 64])
        path.write_bytes(spoil(path.read_bytes()))
        yield {"CACHE": str(path)}

    return around


def flip(data: bytes) -> bytes:
    """A wrong byte in the middle of the largest member; the zip directory is intact."""
    return data[:4000] + bytes([data[4000] ^ 0xFF]) + data[4001:]


@contextlib.contextmanager
def late_rank(folder: Path):
    """Rank 1 of two, which reaches the first barrier and not the second."""
    port = str(free_port())
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    both |= {"ACCELERATE_USE_CPU": "true", "HANGPROOF_HEARTBEAT": str(folder / "hb")}
    (folder / "probe.py").write_text(BARRIER)
    env = {**tiny.environment(folder), **both, "RANK": "1", "LOCAL_RANK": "1"}
    env["PYTHONPATH"] = f"{folder}:{env['PYTHONPATH']}"
    late = subprocess.Popen(
        [sys.executable, "-m", "sd_scripts_patches", "-m", "probe"],
        env=env,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield {**both, "RANK": "0", "LOCAL_RANK": "0"}
    finally:
        late.kill()
        late.wait(30)


@dataclass(frozen=True)
class Probe:
    """source, args: the module to run. env: its limits. real: needs the checkout. around: what must exist while it runs."""

    source: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    real: bool = False
    around: Callable[[Path], AbstractContextManager[dict[str, str]]] = lambda folder: contextlib.nullcontext({})

    def run(self, folder: Path) -> helpers.RunResult:
        folder.mkdir()
        with self.around(folder) as more:
            args = [a.replace("FOLDER", str(folder)) for a in self.args]
            return replace(
                helpers.module(folder, self.source, *args, real=self.real, **{**self.env, **more}), folder=folder
            )


BATCHES = {
    "HANGPROOF_DATALOADER_TIMEOUT_S": "8",
    "HANGPROOF_DATALOADER_FIRST_BATCH_S": "60",
    "HANGPROOF_EXIT_GRACE_S": "8",
}
FAILS = "time.sleep(1.5); raise OSError('disk full')"
PROBES = {
    "worker asleep": Probe(loader("time.sleep(3600)"), ("2",), BATCHES),
    "worker stopped": Probe(loader("os.kill(os.getpid(), signal.SIGSTOP)"), ("1",), BATCHES),
    "worker deaf": Probe(loader(DEAF), ("2",), BATCHES),
    "worker deaf, iterator dropped": Probe(loader(DEAF, bad=1, after=FAILS), ("2",), BATCHES),
    "worker deaf, iterator kept": Probe(loader(DEAF, bad=1, after=FAILS, kept="kept = iter(loader)"), ("2",), BATCHES),
    "worker slow to exit": Probe(loader(SLOW_EXIT), ("2",), BATCHES),
    "no workers": Probe(loader("time.sleep(3600)"), ("0",), {"HANGPROOF_DATALOADER_FIRST_BATCH_S": "5"}),
    "slow first batch": Probe(
        loader("time.sleep(5)", bad=0), ("2",), {**BATCHES, "HANGPROOF_DATALOADER_TIMEOUT_S": "3"}
    ),
    "pool thread, failed": Probe(POOL, ("fail",), {"HANGPROOF_EXIT_GRACE_S": "2"}),
    "pool thread, finished": Probe(POOL, ("finish",), {"HANGPROOF_EXIT_GRACE_S": "2"}),
    "exit handler": Probe(
        "import atexit, os, time\natexit.register(time.sleep, 3600)\nos.write(1, f'HANG {time.monotonic()}\\n'.encode())\n",
        env={"HANGPROOF_EXIT_GRACE_S": "1"},
    ),
    **{
        f"future, {way}": Probe(SWAP, (way,), {"HANGPROOF_BLOCK_SWAP_TIMEOUT_S": "1"}, real=True)
        for way in ("wait_for_block", "set_forward_only", "backward hook")
    },
    "npz on a FIFO": Probe(NPZ, env={"HANGPROOF_NPZ_TIMEOUT_S": "2"}, real=True, around=fifo),
    "npz truncated": Probe(NPZ, real=True, around=damaged(lambda data: data[:5000])),
    "npz with a corrupt member": Probe(NPZ, real=True, around=damaged(flip)),
    "tracker never starts, run fails": Probe(
        TRACKER, ("__init__", "fail", "FOLDER"), {"HANGPROOF_TRACKER_TIMEOUT_S": "2"}, real=True
    ),
    "rank late": Probe(BARRIER, env={"HANGPROOF_BARRIER_TIMEOUT_S": "6"}, around=late_rank),
    "fork after CUDA": Probe(FORK),
    "GPU in a forked child": Probe(BAD_FORK),
}
