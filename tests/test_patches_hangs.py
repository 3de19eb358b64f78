"""Each known hang, put in on purpose: the process is gone in time, its code tells, the log names what it waited for.

The small probes use the libraries and classes that sd-scripts uses, under the launcher; test_patches_real.py does the
same inside whole training runs. Most of a probe is waiting, so those that the selected tests ask for are started together.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy
import patches_helpers as helpers
import patches_stalled_fs as stalled
import psutil
import pytest
import tiny_sd_scripts as tiny

from guards import heartbeat

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="workers and FIFOs as on Unix")

MARGIN_S = 10.0  # how much later than its deadline a process may be gone

LOADER = """
import os, signal, sys, time
import torch.utils.data

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, i):
        if i == BAD:
            print("HANG", time.monotonic(), "pid", os.getpid(), flush=True)
            FAULT
        return torch.full((300, 300), float(i))

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Data(), num_workers=int(sys.argv[1]))
    print("loader timeout", loader.timeout)
    KEPT
    for n, batch in enumerate(kept):
        print("got", n, flush=True)
        AFTER
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
POOL = """
import sys, time
ThreadPoolExecutor(1).submit(time.sleep, 3600)
print("HANG", time.monotonic(), flush=True)
if sys.argv[1] == "fail":
    raise ValueError("the error of the script")
"""
SWAP = """
import sys, time
import torch
from library.custom_offloading_utils import ModelOffloader

class Stuck(ModelOffloader):
    def swap_weight_devices(self, a, b):
        print("HANG", time.monotonic(), flush=True)
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
print("HANG", time.monotonic(), flush=True)
LatentsCachingStrategy(True, 1, False)._default_load_latents_from_disk(None, os.environ["CACHE"], (64, 64))
"""
TOKENIZER = """
import sys, time
from transformers import CLIPTokenizer
from library.strategy_base import TokenizeStrategy
print("HANG", time.monotonic(), flush=True)
print("words", len(TokenizeStrategy()._load_tokenizer(CLIPTokenizer, "openai/clip-vit-large-patch14")))
"""
TRACKER = """
import argparse, sys, time
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker
from library import train_util

def never(self, *args, **kwargs):
    print("HANG", time.monotonic(), flush=True)
    time.sleep(3600)

where, how = sys.argv[1:3]
setattr(TensorBoardTracker, where, never)
accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=sys.argv[3])
asked = argparse.Namespace(wandb_run_name=None, log_tracker_config=None, log_tracker_name=None, log_config=False)
train_util.init_trackers(accelerator, asked, "run")
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
print("HANG", time.monotonic(), flush=True)
if accelerator.process_index == 1:
    time.sleep(3600)
accelerator.wait_for_everyone()
"""
BAD_FORK = "import torch\ntorch.cuda._is_in_bad_fork = lambda: True\ntorch.zeros(1, device='cuda')\n"


def loader(fault: str, bad: int = 4, after: str = "pass", kept: str = "kept = loader") -> str:
    for name, text in {"FAULT": fault, "BAD": str(bad), "KEPT": kept, "AFTER": after}.items():
        source = (LOADER if name == "FAULT" else source).replace(name, text)  # noqa: F821 - bound in the first turn
    return source


@contextlib.contextmanager
def fifo(folder: Path):
    """A cache that opens and never answers."""
    os.mkfifo(folder / "x.npz")
    yield {"CACHE": str(folder / "x.npz")}


@contextlib.contextmanager
def stalled_mount(folder: Path):
    """A cache on a mount that does not answer any more: its reader is not even woken by a signal."""
    (folder / "mnt").mkdir()
    with stalled.stalled_mount(folder / "mnt"):
        yield {"CACHE": str(folder / "mnt" / "x.npz")}


def damaged(spoil: Callable[[bytes], bytes]):
    @contextlib.contextmanager
    def around(folder: Path):
        path = folder / "x.npz"
        numpy.savez(path, latents=numpy.zeros((16, 8, 8)), original_size=[64, 64], crop_ltrb=[0, 0, 64, 64])
        path.write_bytes(spoil(path.read_bytes()))
        yield {"CACHE": str(path)}

    return around


def flip(data: bytes) -> bytes:
    """A wrong byte in the middle of the largest member; the zip directory is whole."""
    return data[:4000] + bytes([data[4000] ^ 0xFF]) + data[4001:]


@contextlib.contextmanager
def late_rank(folder: Path):
    """Rank 1 of two, which comes to the first barrier and not to the second."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    both |= {"ACCELERATE_USE_CPU": "true", "HANGPROOF_HEARTBEAT": str(folder / "hb")}
    (folder / "probe.py").write_text(BARRIER)
    env = {**tiny.environment(folder), **both, "RANK": "1", "LOCAL_RANK": "1"}
    env["PYTHONPATH"] = f"{folder}:{env['PYTHONPATH']}"
    late = subprocess.Popen([helpers.python(), "-m", "sd_scripts_patches", "-m", "probe"], env=env, cwd=folder)
    try:
        yield {**both, "RANK": "0", "LOCAL_RANK": "0"}
    finally:
        late.kill()
        late.wait(30)


@contextlib.contextmanager
def silent_hub(folder: Path):
    """A hub that takes every connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        held = []
        threading.Thread(target=_accept, args=(silent, held), daemon=True).start()
        yield {
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_ETAG_TIMEOUT": "300",
            "no_proxy": "127.0.0.1",
        }


def _accept(server: socket.socket, held: list) -> None:
    with contextlib.suppress(OSError):  # closed: the test is over
        while True:
            held.append(server.accept())


@dataclass(frozen=True)
class Probe:
    """source, args: the module to run. env: its deadlines. real: needs the checkout. around: what must be there meanwhile."""

    source: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    real: bool = False
    around: Callable[[Path], AbstractContextManager[dict[str, str]]] = lambda folder: contextlib.nullcontext({})
    why_not: str = ""

    def run(self, folder: Path) -> helpers.Ended:
        folder.mkdir()
        with self.around(folder) as more:
            args = [a.replace("FOLDER", str(folder)) for a in self.args]
            return replace(helpers.module(folder, self.source, *args, **{**self.env, **more}), folder=folder)


BATCHES = {
    "HANGPROOF_DATALOADER_TIMEOUT_S": "4",
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
    "no workers": Probe(loader("time.sleep(3600)"), ("0",), {"HANGPROOF_DATALOADER_FIRST_BATCH_S": "5"}),
    "slow first batch": Probe(
        loader("time.sleep(5)", bad=0), ("2",), {**BATCHES, "HANGPROOF_DATALOADER_TIMEOUT_S": "3"}
    ),
    "pool thread, failed": Probe(POOL, ("fail",), {"HANGPROOF_EXIT_GRACE_S": "2"}),
    "pool thread, finished": Probe(POOL, ("finish",), {"HANGPROOF_EXIT_GRACE_S": "2"}),
    "exit handler": Probe(
        "import atexit, time\natexit.register(time.sleep, 3600)\nprint('HANG', time.monotonic(), flush=True)\n",
        env={"HANGPROOF_EXIT_GRACE_S": "1"},
    ),
    **{
        f"future, {way}": Probe(SWAP, (way,), {"HANGPROOF_BLOCK_SWAP_TIMEOUT_S": "1"}, real=True)
        for way in ("wait_for_block", "set_forward_only", "backward hook")
    },
    "npz on a FIFO": Probe(NPZ, env={"HANGPROOF_NPZ_TIMEOUT_S": "2"}, real=True, around=fifo),
    "npz on a stalled mount": Probe(
        NPZ, env={"HANGPROOF_NPZ_TIMEOUT_S": "2"}, real=True, around=stalled_mount, why_not=stalled.why_not()
    ),
    "npz truncated": Probe(NPZ, real=True, around=damaged(lambda data: data[:5000])),
    "npz with a corrupt member": Probe(NPZ, real=True, around=damaged(flip)),
    "tracker never starts, run fails": Probe(
        TRACKER, ("__init__", "fail", "FOLDER"), {"HANGPROOF_TRACKER_TIMEOUT_S": "2"}, real=True
    ),
    "tracker never logs, run fails": Probe(
        TRACKER, ("log", "fail", "FOLDER"), {"HANGPROOF_TRACKER_TIMEOUT_S": "2"}, real=True
    ),
    "tracker never ends": Probe(TRACKER, ("finish", "end", "FOLDER"), {"HANGPROOF_TRACKER_TIMEOUT_S": "2"}, real=True),
    "hub": Probe(TOKENIZER, env={"HANGPROOF_HUB_TIMEOUT_S": "2"}, real=True, around=silent_hub),
    "rank late": Probe(BARRIER, env={"HANGPROOF_BARRIER_TIMEOUT_S": "10"}, around=late_rank),
    "fork after CUDA": Probe(FORK),
    "GPU in a forked child": Probe(BAD_FORK),
}


def probe(*names: str):
    """The test gets `ended`: how that probe ended."""
    return helpers.asks("ended", *names)


@pytest.fixture(scope="module")
def started(request, tmp_path_factory):
    if not tiny.why_not():
        tiny.site()
    able = {name: p for name, p in PROBES.items() if not (p.why_not or (p.real and tiny.why_not()))}
    folders = tmp_path_factory.mktemp("probes")
    jobs = {name: partial(p.run, folders / name.replace(" ", "-")) for name, p in able.items()}
    with helpers.ahead(request, "ended", jobs, at_once=3) as futures:
        yield futures


@pytest.fixture
def ended(request, started):
    wanted = PROBES[request.param]
    if wanted.why_not:
        pytest.skip(wanted.why_not)
    if wanted.real:
        tiny.need()
    return started[request.param].result()


def gone_in_time(ended: helpers.Ended, deadline_s: float) -> bool:
    return ended.hung_s() < deadline_s + MARGIN_S


def workers_gone(ended: helpers.Ended, within_s: float = 5.0) -> bool:
    return pids_gone([int(pid) for pid in re.findall(r"HANG \S+ pid (\d+)", ended.log)], within_s)


def pids_gone(pids: list[int], within_s: float = 5.0) -> bool:
    assert pids
    limit = time.monotonic() + within_s
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < limit:
        time.sleep(0.1)
    return not any(psutil.pid_exists(pid) for pid in pids)


@probe("worker asleep")
def test_a_worker_asleep(ended):
    assert ended.code == 75 and gone_in_time(ended, 4) and workers_gone(ended), ended
    assert "got 3" in ended.log and "got 4" not in ended.log
    assert "hangproof: waited 4 s for batch 5 of the data loader from worker 0 (pid " in ended.log
    assert "_next_data" in ended.log, "the stacks are in the log"
    assert "loader timeout 4.0" in ended.log


@probe("worker stopped")
def test_a_worker_that_is_stopped(ended):
    """torch's own timeout does not fire here: the parent sits in a receive for the tensor's file descriptor. Ours, from a
    thread, does. (test_faults_sd_scripts.py: the monitor ends it too.)"""
    assert ended.code == 75 and gone_in_time(ended, 4) and workers_gone(ended), ended
    assert "of the data loader from worker 0 (pid " in ended.log


@probe("worker deaf")
def test_a_worker_that_ignores_sigterm_is_ended_with_the_process(ended):
    assert ended.code == 75 and gone_in_time(ended, 4) and workers_gone(ended), ended
    assert "hangproof: waited 4 s for batch 5 of the data loader from worker 0 (pid " in ended.log


@probe("worker deaf, iterator dropped", "worker deaf, iterator kept")
def test_a_worker_that_ignores_sigterm_does_not_hold_a_failed_process(ended, request):
    """The error is the script's own; the exit used to join this worker for ever."""
    says = {"dropped": "waited 5 s for data loader workers to end: ", "kept": "did not end on SIGTERM; killed"}
    assert ended.code == 1 and "OSError: disk full" in ended.log and gone_in_time(ended, 8), ended
    assert says[request.node.callspec.params["ended"].split()[-1]] in ended.log, ended
    assert workers_gone(ended)


@probe("no workers")
def test_the_trainer_itself_reading(ended):
    assert ended.code == 75 and gone_in_time(ended, 5), ended
    assert "waited 5 s for batch 5 of the data loader (no workers: read by the trainer itself)" in ended.log


@probe("slow first batch")
def test_the_first_batch_has_a_longer_budget(ended):
    assert ended.code == 0 and "got 5" in ended.log, ended


@probe("pool thread, failed", "pool thread, finished")
def test_a_pool_thread_stuck_at_exit(ended, request):
    """The work is done, or it is not: the code says which, the stuck thread changes neither."""
    failed = request.node.callspec.params["ended"].endswith("failed")
    assert ended.code == int(failed) and gone_in_time(ended, 2), ended
    assert ("ValueError: the error of the script" in ended.log) == failed
    assert f"hangproof: waited 2 s at exit for ThreadPoolExecutor-0_0; leaving with code {int(failed)}" in ended.log


@probe("exit handler")
def test_an_exit_handler_that_never_returns(ended):
    assert ended.code == 0 and gone_in_time(ended, 1), ended
    assert "waited 1 s at exit for an exit handler" in ended.log


@probe("future, wait_for_block", "future, set_forward_only", "future, backward hook")
def test_a_stuck_future_of_block_swap(ended, request):
    assert ended.code == 75 and gone_in_time(ended, 1), ended
    block = 0 if "backward hook" in request.node.callspec.params["ended"] else 3
    assert f"waited 1 s for block {block} of 4 to be swapped in (block swap, 1 blocks)" in ended.log
    assert "swap_weight_devices" in ended.log, "the stack of the stuck pool thread is in the log"


@probe("npz on a FIFO")
def test_an_npz_on_a_fifo(ended):
    assert ended.code == 1 and gone_in_time(ended, 2), ended
    assert re.search(r"TimeoutError: waited 2 s for the directory of \S+x\.npz", ended.log)


@probe("npz on a stalled mount")
def test_an_npz_on_a_stalled_mount(ended):
    """The alarm comes and changes nothing; the second deadline, a little later, ends the process."""
    assert ended.code == 75 and gone_in_time(ended, 2), ended
    assert re.search(r"hangproof: waited 7 s for the directory of \S+x\.npz \(not interruptible\)", ended.log)


@probe("npz truncated", "npz with a corrupt member")
def test_a_damaged_npz(ended, request):
    part = "the directory" if "truncated" in request.node.callspec.params["ended"] else "'latents'"
    assert ended.code == 1 and gone_in_time(ended, 0), ended
    assert re.search(rf"ValueError: \S+x\.npz is damaged \({part}: .*renamed x\.npz\.corrupt", ended.log), ended


@probe("tracker never starts, run fails", "tracker never logs, run fails")
def test_a_tracker_that_never_returns_does_not_hold_a_failed_run(ended, request):
    assert ended.code == 1 and "ValueError: the error of the script" in ended.log and gone_in_time(ended, 2), ended
    assert "trained" in ended.log
    if "starts" in request.node.callspec.params["ended"]:
        assert "waited 2 s for trackers to start (tensorboard); the run goes on offline" in ended.log


@probe("tracker never ends")
def test_a_tracker_that_never_returns_at_the_end_is_left_behind(ended):
    """The work is saved by then (test_patches_save.py), so the code is that of a run that is done."""
    assert ended.code == 0 and "trained" in ended.log and gone_in_time(ended, 2), ended
    assert "waited 2 s for tracker tensorboard to finish; left behind" in ended.log


@probe("hub")
def test_a_hub_that_never_answers(ended):
    assert ended.code == 75 and gone_in_time(ended, 2), ended
    assert "hangproof: waited 2 s for a byte of " in ended.log
    assert "openai/clip-vit-large-patch14 from the hub" in ended.log


@probe("fork after CUDA")
def test_fork_after_cuda_is_refused_by_name(ended):
    """No GPU is needed: what is tested is the decision, so CUDA only says that it has been used."""
    assert ended.code == 1 and "[tensor([1]), tensor([2])]" in ended.log, ended
    assert "fork after CUDA refused: map of a data set would be forked" in ended.log
    assert "--max_data_loader_n_workers 0" in ended.log


@probe("GPU in a forked child")
def test_a_forked_child_that_reaches_for_the_gpu_is_told_by_name(ended):
    assert ended.code == 1 and "fork after CUDA: process " in ended.log and "was forked from" in ended.log, ended


def test_a_killed_trainer_takes_its_workers_with_it(tmp_path):
    if sys.platform != "linux":
        pytest.skip("the parent's death is a Linux signal")
    (tmp_path / "probe.py").write_text(loader("time.sleep(3600)").replace("if i == 4:", "if True:"))
    env = tiny.environment(tmp_path)
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    command = [helpers.python(), "-m", "sd_scripts_patches", "-m", "probe", "2"]
    with subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        pids = []
        for line in process.stdout:
            pids += [int(line.split()[-1])] if line.startswith("HANG") else []
            if len(pids) == 2:
                break
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert len(pids) == 2 and pids_gone(pids, 30)


@probe("rank late")
def test_a_rank_that_never_reaches_the_barrier(ended):
    assert ended.code == 75 and "met once" in ended.log and gone_in_time(ended, 10), ended
    assert "hangproof: waited 10 s for all 2 ranks at a barrier (this is rank 0, phase import)" in ended.log
    assert [(b.rank, b.outcome) for b in heartbeat.read_all(ended.folder / "hb")] == [(0, "deadline"), (1, "running")]
