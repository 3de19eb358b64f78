"""Each known hang, put in on purpose: the process is gone in time, its code tells, the log names what it waited for.

The small probes use the libraries and classes that sd-scripts uses, under the launcher; test_patches_real.py does the
same inside whole training runs. Most of a probe is waiting, so those that the selected tests ask for are started together.
"""

import re
import signal
import subprocess
import sys
import time
from functools import partial

import patches_helpers as helpers
import psutil
import pytest
import tiny_sd_scripts as tiny
from patches_probes import PROBES, loader

from guards import heartbeat

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="workers and FIFOs as on Unix")

MARGIN_S = 10.0  # how much later than its deadline a process may be gone


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


def workers_gone(ended: helpers.Ended, within_s: float = 30.0) -> bool:
    return pids_gone([int(pid) for pid in re.findall(r"HANG \S+ pid (\d+)", ended.log)], within_s)


def pids_gone(pids: list[int], within_s: float = 30.0) -> bool:
    assert pids
    limit = time.monotonic() + within_s
    while any(map(lives, pids)) and time.monotonic() < limit:
        time.sleep(0.1)
    return not any(map(lives, pids))


def lives(pid: int) -> bool:
    """A dead process that nobody has reaped is gone too."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@probe("worker asleep")
def test_a_worker_asleep(ended):
    assert ended.code == 75 and gone_in_time(ended, 8) and workers_gone(ended), ended.log
    assert "got 3" in ended.log and "got 4" not in ended.log
    assert "hangproof: waited 8 s for batch 5 of the data loader from worker 0 (pid " in ended.log
    assert "_next_data" in ended.log, "the stacks are in the log"
    assert "loader timeout 8.0" in ended.log


@probe("worker stopped")
def test_a_worker_that_is_stopped(ended):
    """torch's own timeout does not fire here: the parent sits in a receive for the tensor's file descriptor. Ours, from a
    thread, does. (test_faults_sd_scripts.py: the monitor ends it too.)"""
    assert ended.code == 75 and gone_in_time(ended, 8) and workers_gone(ended), ended.log
    assert "of the data loader from worker 0 (pid " in ended.log


@probe("worker deaf")
def test_a_worker_that_ignores_sigterm_is_ended_with_the_process(ended):
    assert ended.code == 75 and gone_in_time(ended, 8) and workers_gone(ended), ended.log
    assert "hangproof: waited 8 s for batch 5 of the data loader from worker 0 (pid " in ended.log


@probe("worker deaf, iterator dropped", "worker deaf, iterator kept")
def test_a_worker_that_ignores_sigterm_does_not_hold_a_failed_process(ended, request):
    """The error is the script's own; the exit used to join this worker for ever."""
    says = {"dropped": "waited 5 s for data loader workers to end: ", "kept": "did not end on SIGTERM; killed"}
    assert ended.code == 1 and "OSError: disk full" in ended.log and gone_in_time(ended, 8), ended.log
    assert says[request.node.callspec.params["ended"].split()[-1]] in ended.log, ended.log
    assert workers_gone(ended)


@probe("no workers")
def test_the_trainer_itself_reading(ended):
    assert ended.code == 75 and gone_in_time(ended, 5), ended.log
    assert "waited 5 s for batch 5 of the data loader (no workers: read by the trainer itself)" in ended.log


@probe("slow first batch")
def test_the_first_batch_has_a_longer_budget(ended):
    assert ended.code == 0 and "got 5" in ended.log, ended.log


@probe("pool thread, failed", "pool thread, finished")
def test_a_pool_thread_stuck_at_exit(ended, request):
    """The work is done, or it is not: the code says which, the stuck thread changes neither."""
    failed = request.node.callspec.params["ended"].endswith("failed")
    assert ended.code == int(failed) and gone_in_time(ended, 2), ended.log
    assert ("ValueError: the error of the script" in ended.log) == failed
    assert f"hangproof: waited 2 s at exit for ThreadPoolExecutor-0_0; leaving with code {int(failed)}" in ended.log


@probe("exit handler")
def test_an_exit_handler_that_never_returns(ended):
    assert ended.code == 0 and gone_in_time(ended, 1), ended.log
    assert "waited 1 s at exit for an exit handler" in ended.log


@probe("future, wait_for_block", "future, set_forward_only", "future, backward hook")
def test_a_stuck_future_of_block_swap(ended, request):
    assert ended.code == 75 and gone_in_time(ended, 1), ended.log
    block = 0 if "backward hook" in request.node.callspec.params["ended"] else 3
    assert f"waited 1 s for block {block} of 4 to be swapped in (block swap, 1 blocks)" in ended.log
    assert "swap_weight_devices" in ended.log, "the stack of the stuck pool thread is in the log"


@probe("npz on a FIFO")
def test_an_npz_on_a_fifo(ended):
    assert ended.code == 1 and gone_in_time(ended, 2), ended.log
    assert re.search(r"TimeoutError: waited 2 s for the directory of \S+x\.npz", ended.log)


@probe("npz on a stalled mount")
def test_an_npz_on_a_stalled_mount(ended):
    """The alarm comes and changes nothing; the second deadline, a little later, ends the process."""
    assert ended.code == 75 and gone_in_time(ended, 2), ended.log
    assert re.search(r"hangproof: waited 7 s for the directory of \S+x\.npz \(not interruptible\)", ended.log)


@probe("npz truncated", "npz with a corrupt member")
def test_a_damaged_npz(ended, request):
    part = "the directory" if "truncated" in request.node.callspec.params["ended"] else "'latents'"
    assert ended.code == 1 and gone_in_time(ended, 0), ended.log
    assert re.search(rf"ValueError: \S+x\.npz is damaged \({part}: .*renamed x\.npz\.corrupt", ended.log), ended.log


@probe("tracker never starts, run fails")
def test_a_tracker_that_never_returns_does_not_hold_a_failed_run(ended):
    """A run that does not fail goes on offline (test_patches_real.py) and has saved all before it ends (test_patches_save.py)."""
    assert ended.code == 1 and "ValueError: the error of the script" in ended.log and gone_in_time(ended, 2), ended.log
    assert "trained" in ended.log
    assert "waited 2 s for trackers to start (tensorboard); the run goes on offline" in ended.log


@probe("fork after CUDA")
def test_fork_after_cuda_is_refused_by_name(ended):
    """No GPU is needed: what is tested is the decision, so CUDA only says that it has been used."""
    assert ended.code == 1 and "[tensor([1]), tensor([2])]" in ended.log, ended.log
    assert "fork after CUDA refused: map of a data set would be forked" in ended.log
    assert "--max_data_loader_n_workers 0" in ended.log


@probe("GPU in a forked child")
def test_a_forked_child_that_reaches_for_the_gpu_is_told_by_name(ended):
    assert ended.code == 1 and "fork after CUDA: process " in ended.log and "was forked from" in ended.log, ended.log


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
    assert len(pids) == 2 and pids_gone(pids)


@probe("rank late")
def test_a_rank_that_never_reaches_the_barrier(ended):
    assert ended.code == 75 and "met once" in ended.log and gone_in_time(ended, 10), ended.log
    assert "hangproof: waited 10 s for all 2 ranks at a barrier (this is rank 0, phase import)" in ended.log
    assert [(b.rank, b.outcome) for b in heartbeat.read_all(ended.folder / "hb")] == [(0, "deadline"), (1, "running")]
