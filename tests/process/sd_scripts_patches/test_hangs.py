"""Each known hang, injected: the process exits in time, its exit code is right, the log names what it waited for.

The small probes use the libraries and classes that sd-scripts uses, under the launcher; tests/upstream/test_sd_scripts.py does the
same in complete training runs. A probe mostly waits, so the probes of the selected tests are started together.
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

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="workers and FIFOs as on Unix")]


def probe(*names: str):
    """Run the test on the result of these probes."""
    return helpers.asks("result", *names)


@pytest.fixture(scope="module")
def started(request, tmp_path_factory):
    folders = tmp_path_factory.mktemp("probes")
    jobs = {name: partial(p.run, folders / name.replace(" ", "-")) for name, p in PROBES.items()}
    with helpers.ahead(request, "result", jobs, at_once=6) as futures:
        yield futures


@pytest.fixture
def result(request, started):
    return started[request.param].result()


def workers_gone(result: helpers.RunResult, within_s: float = 30.0) -> bool:
    return pids_gone([int(pid) for pid in re.findall(r"HANG \S+ pid (\d+)", result.log)], within_s)


def pids_gone(pids: list[int], within_s: float = 30.0) -> bool:
    assert pids
    limit = time.monotonic() + within_s
    while any(map(is_alive, pids)) and time.monotonic() < limit:
        time.sleep(0.1)
    return not any(map(is_alive, pids))


def is_alive(pid: int) -> bool:
    """A zombie counts as gone."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@probe("worker asleep")
def test_a_worker_that_sleeps(result):
    assert result.code == 75 and workers_gone(result), result.log
    assert "got 3" in result.log and "got 4" not in result.log
    assert "hangproof: waited 8 s for batch 5 of the data loader from worker 0 (pid " in result.log
    assert "_next_data" in result.log, "the stacks are in the log"
    assert "loader timeout 8.0" in result.log


@probe("worker stopped")
def test_a_worker_that_is_stopped(result):
    """torch's own timeout does not fire here: the parent sits in a receive for the tensor's file descriptor. Ours, from a
    thread, does. (tests/campaigns/test_faults_sd_scripts.py: so does the monitor.)"""
    assert result.code == 75 and workers_gone(result), result.log
    assert "of the data loader from worker 0 (pid " in result.log


@probe("worker deaf")
def test_a_worker_that_ignores_sigterm_is_killed_with_the_process(result):
    assert result.code == 75 and workers_gone(result), result.log
    assert "hangproof: waited 8 s for batch 5 of the data loader from worker 0 (pid " in result.log


@probe("worker deaf, iterator dropped", "worker deaf, iterator kept")
def test_a_worker_that_ignores_sigterm_does_not_hold_a_failed_process(result, request):
    """The error is the script's own. The interpreter's exit would join this worker for ever."""
    messages = {"dropped": "waited 5 s for data loader workers to exit: ", "kept": "did not exit on SIGTERM; killed"}
    assert result.code == 1 and "OSError: disk full" in result.log, result.log
    assert messages[request.node.callspec.params["result"].split()[-1]] in result.log, result.log
    assert workers_gone(result)


@probe("worker slow to exit")
def test_a_worker_that_does_not_exit_after_its_last_batch_is_killed_and_the_run_continues(result):
    assert result.code == 0 and "got 5" in result.log, result.log
    assert "hangproof: waited 5 s for data loader workers to exit: " in result.log and "ValueError" not in result.log
    assert workers_gone(result)


@probe("no workers")
def test_the_trainer_itself_reads(result):
    assert result.code == 75, result.log
    assert "waited 5 s for batch 5 of the data loader (no workers: the trainer itself reads it)" in result.log


@probe("slow first batch")
def test_the_first_batch_has_a_longer_limit(result):
    assert result.code == 0 and "got 5" in result.log, result.log


@probe("pool thread, failed", "pool thread, finished")
def test_a_pool_thread_stuck_at_exit(result, request):
    """The exit code is that of the script; the stuck thread does not change it."""
    failed = request.node.callspec.params["result"].endswith("failed")
    assert result.code == int(failed), result.log
    assert ("ValueError: the error of the script" in result.log) == failed
    assert f"hangproof: waited 2 s at exit for ThreadPoolExecutor-0_0; exiting with code {int(failed)}" in result.log


@probe("exit handler")
def test_an_exit_handler_that_never_returns(result):
    assert result.code == 0, result.log
    assert "waited 1 s at exit for an exit handler" in result.log


@probe("fork after CUDA")
def test_fork_after_cuda_is_refused_by_name(result):
    """No GPU is needed: the decision is tested, so CUDA only reports that it has been used."""
    assert result.code == 1 and "[tensor([1]), tensor([2])]" in result.log, result.log
    assert "fork after CUDA refused: map of a data set would be forked" in result.log
    assert "--max_data_loader_n_workers 0" in result.log


@probe("GPU in a forked child")
def test_a_forked_child_that_uses_the_gpu_gets_an_error_that_names_it(result):
    assert result.code == 1 and "fork after CUDA: process " in result.log and "was forked from" in result.log, (
        result.log
    )


def test_a_killed_trainer_takes_its_workers_with_it(tmp_path):
    if sys.platform != "linux":
        pytest.skip("the parent's death is a Linux signal")
    (tmp_path / "probe.py").write_text(loader("time.sleep(3600)").replace("if i == 4:", "if True:"))
    env = tiny.environment(tmp_path)
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    command = [sys.executable, "-m", "sd_scripts_patches", "-m", "probe", "2"]
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
def test_a_rank_that_never_reaches_the_barrier(result):
    assert result.code == 75 and "met once" in result.log, result.log
    assert "hangproof: waited 6 s for all 2 ranks at a barrier (this is rank 0, phase import)" in result.log
    assert [(b.rank, b.outcome) for b in heartbeat.read_all(result.folder / "hb")] == [(0, "deadline"), (1, "running")]
