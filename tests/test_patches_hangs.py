"""Each known hang, put in on purpose: the process is gone in time, its code tells, the log names what it waited for.

The small probes use the libraries and classes that sd-scripts uses, under the launcher; test_patches_real.py does the
same inside whole training runs.
"""

import re
import signal
import socket
import subprocess
import sys
import threading
import time

import patches_helpers as helpers
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
        if i == 4:
            FAULT
        return torch.full((300, 300), float(i))

if __name__ == "__main__":
    begun = time.monotonic()
    loader = torch.utils.data.DataLoader(Data(), num_workers=int(sys.argv[1]))
    for n, batch in enumerate(loader):
        if n == 0:
            print("loader timeout", loader.timeout)
            begun = time.monotonic()
        print("got", n, flush=True)
"""


def gone_in_time(ended: helpers.Ended, deadline_s: float, start_s: float = 15.0) -> bool:
    """Start-up (imports, on a busy machine) is not counted against the deadline."""
    return ended.took_s < start_s + deadline_s + MARGIN_S


def loader(folder, fault: str, workers: int, **env) -> helpers.Ended:
    limits = {
        "HANGPROOF_DATALOADER_TIMEOUT_S": "2",
        "HANGPROOF_DATALOADER_FIRST_BATCH_S": "4",
        "HANGPROOF_EXIT_GRACE_S": "5",
    }
    return helpers.module(folder, LOADER.replace("FAULT", fault), str(workers), timeout_s=60, **{**limits, **env})


def test_a_worker_that_sleeps(tmp_path):
    ended = loader(tmp_path, "time.sleep(3600)", 2)
    assert ended.code == 75 and gone_in_time(ended, 2), ended
    assert "got 3" in ended.log and "got 4" not in ended.log
    assert "hangproof: waited 2 s for batch 5 of the data loader from worker 0 (pid " in ended.log
    assert "_next_data" in ended.log, "the stacks are in the log"
    assert "loader timeout 2.0" in ended.log


def test_a_worker_that_is_stopped(tmp_path):
    """torch's own timeout does not fire here: the parent sits in a receive for the tensor's file descriptor."""
    ended = loader(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)", 1)
    assert ended.code == 75 and gone_in_time(ended, 2), ended
    assert "of the data loader from worker 0 (pid " in ended.log


def test_the_trainer_itself_reading(tmp_path):
    ended = loader(tmp_path, "time.sleep(3600)", 0)
    assert ended.code == 75 and gone_in_time(ended, 4), ended
    assert "waited 4 s for batch 5 of the data loader (no workers: read by the trainer itself)" in ended.log


def test_the_first_batch_has_a_longer_budget(tmp_path):
    slow_start = LOADER.replace("FAULT", "pass").replace(
        "if i == 4:", "if i == 0:\n            time.sleep(3)\n        if i == 4:"
    )
    limits = {"HANGPROOF_DATALOADER_TIMEOUT_S": "1", "HANGPROOF_DATALOADER_FIRST_BATCH_S": "20"}
    ended = helpers.module(tmp_path, slow_start, "2", timeout_s=60, **limits)
    assert ended.code == 0 and "got 5" in ended.log, ended


def test_a_worker_that_ignores_sigterm_outlives_nothing(tmp_path):
    """It sleeps too, and is killed: by the deadline's end of the process, with it."""
    ended = loader(
        tmp_path,
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('pid', os.getpid(), flush=True); time.sleep(3600)",
        2,
    )
    assert ended.code == 75 and gone_in_time(ended, 2), ended
    assert workers_gone(ended)


@pytest.mark.parametrize(
    "held, says",
    [(False, "waited 5 s for data loader workers to end: "), (True, "did not end on SIGTERM; killed")],
    ids=["iterator dropped", "iterator kept"],
)
def test_a_worker_that_ignores_sigterm_does_not_hold_a_failed_process(tmp_path, held, says):
    """The error is the script's own; the exit used to join this worker for ever."""
    source = LOADER.replace("if i == 4:", "if i == 1:").replace(
        "FAULT",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('pid', os.getpid(), flush=True); time.sleep(3600)",
    )
    source = source.replace('print("got", n, flush=True)', "time.sleep(1.5); raise OSError('disk full')")
    if held:
        source = source.replace("enumerate(loader)", "enumerate(kept)").replace(
            "    for n,", "    kept = iter(loader)\n    for n,"
        )
    ended = helpers.module(tmp_path, source, "2", timeout_s=60, HANGPROOF_EXIT_GRACE_S="8")
    assert ended.code == 1 and "OSError: disk full" in ended.log and gone_in_time(ended, 8), ended
    assert says in ended.log
    assert workers_gone(ended)


def workers_gone(ended: helpers.Ended, within_s: float = 5.0) -> bool:
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", ended.log)]  # two workers may share a line
    assert pids, ended
    limit = time.monotonic() + within_s
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < limit:
        time.sleep(0.1)
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_a_killed_trainer_takes_its_workers_with_it(tmp_path):
    if sys.platform != "linux":
        pytest.skip("the parent's death is a Linux signal")
    source = LOADER.replace("if i == 4:", "if True:").replace(
        "FAULT", "print('pid', os.getpid(), flush=True); time.sleep(3600)"
    )
    (tmp_path / "probe.py").write_text(source)
    env = tiny.environment(tmp_path)
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    runner = str(tiny.python() if tiny.python().is_file() else sys.executable)
    process = subprocess.Popen(
        [runner, "-m", "sd_scripts_patches", "-m", "probe", "2"],
        env=env,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    pids = []
    for line in process.stdout:
        pids += [int(line.split()[1])] if line.startswith("pid ") else []
        if len(pids) == 2:
            break
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    limit = time.monotonic() + 5
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < limit:
        time.sleep(0.1)
    assert len(pids) == 2 and not any(psutil.pid_exists(pid) for pid in pids)


POOL = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
ThreadPoolExecutor(1).submit(time.sleep, 3600)
if sys.argv[1] == "fail":
    raise ValueError("the error of the script")
"""


@pytest.mark.parametrize("how, code", [("fail", 1), ("finish", 0)])
def test_a_pool_thread_stuck_at_exit(tmp_path, how, code):
    ended = helpers.module(tmp_path, POOL, how, timeout_s=30, HANGPROOF_EXIT_GRACE_S="2")
    assert ended.code == code and gone_in_time(ended, 2, start_s=3), ended
    assert ("ValueError: the error of the script" in ended.log) == (how == "fail")
    assert "hangproof: waited 2 s at exit for ThreadPoolExecutor-0_0; leaving with code" in ended.log


def test_an_exit_handler_that_never_returns(tmp_path):
    source = "import atexit, time\natexit.register(time.sleep, 3600)\n"
    ended = helpers.module(tmp_path, source, timeout_s=30, HANGPROOF_EXIT_GRACE_S="1")
    assert ended.code == 0 and "waited 1 s at exit for an exit handler" in ended.log, ended


SWAP = """
import sys, time
import torch
from library.custom_offloading_utils import ModelOffloader

class Stuck(ModelOffloader):
    def swap_weight_devices(self, a, b):
        time.sleep(3600)

blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(4))
offloader = Stuck(blocks, 1, torch.device("cpu"), supports_backward=True)
print("ready", flush=True)
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


@pytest.mark.parametrize("way", ["wait_for_block", "set_forward_only", "backward hook"])
def test_a_swap_whose_future_never_comes(tmp_path, way):
    tiny.need()
    ended = helpers.module(tmp_path, SWAP, way, timeout_s=60, HANGPROOF_BLOCK_SWAP_TIMEOUT_S="1")
    assert ended.code == 75 and gone_in_time(ended, 1), ended
    block = 0 if way == "backward hook" else 3
    assert f"waited 1 s for block {block} of 4 to be swapped in (block swap, 1 blocks)" in ended.log
    assert "swap_weight_devices" in ended.log, "the stack of the stuck pool thread is in the log"


HUB = """
from library.strategy_flux import FluxTokenizeStrategy
print("ready", flush=True)
FluxTokenizeStrategy(32, None)
"""


def test_a_hub_that_never_answers(tmp_path):
    tiny.need()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        held = []
        threading.Thread(target=lambda: held.append([silent.accept() for _ in range(20)]), daemon=True).start()
        env = {
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_ETAG_TIMEOUT": "300",
            "HANGPROOF_HUB_TIMEOUT_S": "2",
            "no_proxy": "127.0.0.1",
        }
        tiny.write_site(tmp_path)
        ended = helpers.module(tmp_path, HUB, timeout_s=60, **env)
    assert ended.code == 75 and gone_in_time(ended, 2), ended
    assert (
        "hangproof: waited 2 s for a byte of " in ended.log
        and "of openai/clip-vit-large-patch14 from the hub" in ended.log
    )


def test_fork_after_cuda_is_refused_by_name(tmp_path):
    """No GPU is needed: what is tested is the decision, so CUDA only says that it has been used."""
    source = (
        "import multiprocessing as mp, torch\n"
        "torch.cuda.is_initialized = lambda: True\n"
        "if __name__ == '__main__':\n"
        "    print(list(torch.utils.data.DataLoader([1, 2], num_workers=1)))\n"
        "    mp.get_context('fork').Process(target=print, name='map of a data set').start()\n"
    )
    ended = helpers.module(tmp_path, source, timeout_s=60)
    assert ended.code == 1 and "[tensor([1]), tensor([2])]" in ended.log, ended
    assert "fork after CUDA refused: map of a data set would be forked" in ended.log
    assert "--max_data_loader_n_workers 0" in ended.log


def test_a_forked_child_that_reaches_for_the_gpu_is_told_by_name(tmp_path):
    source = "import torch\ntorch.cuda._is_in_bad_fork = lambda: True\ntorch.zeros(1, device='cuda')\n"
    ended = helpers.module(tmp_path, source, timeout_s=60)
    assert ended.code == 1 and "fork after CUDA: process " in ended.log and "was forked from" in ended.log, ended


BARRIER = """
import os, time
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
accelerator.wait_for_everyone()
print("met once", flush=True)
if accelerator.process_index == 1:
    time.sleep(3600)
accelerator.wait_for_everyone()
"""


def test_a_rank_that_never_reaches_the_barrier(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"ACCELERATE_USE_CPU": "true", "HANGPROOF_HEARTBEAT": str(tmp_path / "hb")}
    (tmp_path / "probe.py").write_text(BARRIER)
    env = {**tiny.environment(tmp_path), **common, "RANK": "1", "LOCAL_RANK": "1"}
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    runner = str(tiny.python() if tiny.python().is_file() else sys.executable)
    late = subprocess.Popen([runner, "-m", "sd_scripts_patches", "-m", "probe"], env=env, cwd=tmp_path)
    try:
        limit = {"HANGPROOF_BARRIER_TIMEOUT_S": "2"}
        ended = helpers.module(tmp_path, BARRIER, timeout_s=90, **common, **limit, RANK="0", LOCAL_RANK="0")
    finally:
        late.kill()
        late.wait(10)
    assert ended.code == 75 and "met once" in ended.log, ended
    assert "hangproof: waited 2 s for all 2 ranks at a barrier (this is rank 0, phase import)" in ended.log
    assert [(b.rank, b.outcome) for b in heartbeat.read_all(tmp_path / "hb")] == [(0, "deadline"), (1, "running")]
