"""Each known hang, injected: the process exits in time, its exit code is right, the log names what it waited for.

The small probes use the libraries that sd-scripts uses, under the launcher. tests/campaigns/faults.toml has complete
training runs. A worker writes `HANG`, its clock and its pid when it starts to hang. Each line is one
call: loader workers write to the same pipe, and `print` writes in pieces that would mix with theirs.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from functools import partial

import patches_helpers as helpers
import pytest
from monitor_helpers import wait_for

from monitor.process.platform import process_info

pytestmark = pytest.mark.slow
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
    KEPT
    for n, batch in enumerate(kept):
        write(f"got {n}")
        AFTER
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
HELD = "import ctypes; ctypes.PyDLL(None).sleep(3600)"  # with the GIL, so no thread of the worker answers a SIGTERM
SLOW_EXIT = "import multiprocessing.util; multiprocessing.util.Finalize(None, time.sleep, (3600,), exitpriority=100)"
POOL = """
import time
from concurrent.futures import ThreadPoolExecutor
ThreadPoolExecutor(1).submit(time.sleep, 3600)
"""
FORK = """
import multiprocessing as mp, torch
torch.cuda.is_initialized = lambda: True
if __name__ == '__main__':
    print(list(torch.utils.data.DataLoader([1, 2], num_workers=1)))
    mp.get_context('fork').Process(target=print, name='map of a data set').start()
"""
FIRST_USE = """
import torch
before = torch.backends.cuda.cudnn_sdp_enabled()
try:
    torch.cuda.init()
except AssertionError:  # a build for the processor alone
    pass
print(f"cuDNN's attention: {before}, then {torch.backends.cuda.cudnn_sdp_enabled()}")
"""
BAD_FORK = "import torch\ntorch.cuda._is_in_bad_fork = lambda: True\ntorch.zeros(1, device='cuda')\n"


def loader(fault: str, bad: int = 4, after: str = "pass", kept: str = "kept = loader") -> str:
    """Return LOADER with its placeholders filled in."""
    source = LOADER
    for name, text in {"FAULT": fault, "BAD": str(bad), "KEPT": kept, "AFTER": after}.items():
        source = source.replace(name, text)
    return source


@dataclass(frozen=True)
class Probe:
    """source, args: the module to run. env: its limits. code, says, never: exit code, what its log has and lacks."""

    source: str
    code: int
    says: tuple[str, ...]
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    never: str = "Segmentation fault"

    def run(self, folder) -> helpers.RunResult:
        folder.mkdir()
        return helpers.module(folder, self.source, *self.args, trainer=None, **self.env)


BATCHES = {"HANGPROOF_DATALOADER_TIMEOUT_S": "8", "HANGPROOF_DATALOADER_FIRST_BATCH_S": "60"}
BATCHES["HANGPROOF_EXIT_GRACE_S"] = "8"
FAILS = "time.sleep(1.5); raise OSError('disk full')"
WORKER = "hangproof: waited 8 s for batch 5 of the data loader from worker 0 (pid "
PROBES = {
    # torch's own timeout does not fire here: the parent sits in a receive for the tensor's file descriptor.
    "worker stopped": Probe(
        loader("os.kill(os.getpid(), signal.SIGSTOP)"), 75, ("of the data loader from worker 0 (pid ",), ("1",), BATCHES
    ),
    "worker fails": Probe(
        loader("raise OSError('no image')"), 1, ("batch 5 of the data loader from worker 0 (pid ", ") failed: OSError"),
        ("2",), BATCHES,
    ),
    "worker deaf": Probe(
        loader(DEAF), 75, (WORKER, "got 3", "_next_data"), ("2",), BATCHES, never="got 4"
    ),
    # The error is the script's own. The interpreter's exit would join this worker for ever.
    "worker deaf, iterator dropped": Probe(
        loader(HELD, bad=1, after=FAILS), 1,
        ("OSError: disk full", "waited 5 s for data loader workers to exit: "), ("2",), BATCHES,
    ),
    "worker deaf, iterator kept": Probe(
        loader(HELD, bad=1, after=FAILS, kept="kept = iter(loader)"), 1,
        ("OSError: disk full", "did not exit on SIGTERM; killed"), ("2",), BATCHES,
    ),
    "worker slow to exit": Probe(
        loader(SLOW_EXIT), 0, ("got 5", "waited 5 s for data loader workers to exit: "), ("2",), BATCHES, never="ValueError"
    ),
    # Its workers must not outlive it.
    "trainer killed": Probe(
        loader(DEAF, bad=1, after="time.sleep(1.5); os.kill(os.getpid(), signal.SIGKILL)"), -9, ("got 0",), ("2",), BATCHES
    ),
    "no workers": Probe(
        loader("time.sleep(3600)"), 75,
        ("waited 5 s for batch 5 of the data loader (no workers: the trainer itself reads it)",),
        ("0",), {"HANGPROOF_DATALOADER_FIRST_BATCH_S": "5"},
    ),
    "pool thread": Probe(
        POOL, 0, ("waited 2 s at exit for ThreadPoolExecutor-0_0; exiting with code 0",), env={"HANGPROOF_EXIT_GRACE_S": "2"}
    ),
    "exit handler": Probe(
        "import atexit, time\natexit.register(time.sleep, 3600)\n", 0,
        ("waited 1 s at exit for an exit handler",), env={"HANGPROOF_EXIT_GRACE_S": "1"},
    ),
    # No GPU is needed: the decision is tested, so CUDA only reports that it has been used.
    "fork after CUDA": Probe(
        FORK, 1, ("[tensor([1]), tensor([2])]", "fork after CUDA refused: map of a data set would be forked",
                  "--max_data_loader_n_workers 0"),
    ),
    "first use of the GPU": Probe(FIRST_USE, 0, ("cuDNN's attention: True, then False",)),
    "GPU in a forked child": Probe(BAD_FORK, 1, ("fork after CUDA: process ", "was forked from")),
}  # fmt: skip

if sys.platform != "linux":
    del PROBES["trainer killed"]  # that its workers die too is a Linux signal


@pytest.fixture(scope="module")
def futures(request, tmp_path_factory):
    """The probes of the selected tests, started together, because a probe mostly waits."""
    folders = tmp_path_factory.mktemp("probes")
    jobs = {name: partial(probe.run, folders / name.replace(" ", "-")) for name, probe in PROBES.items()}
    with helpers.ahead(request, "name", jobs, at_once=6) as found:
        yield found


@pytest.mark.parametrize("name", PROBES)
def test_the_process_ends_in_time_and_the_log_names_what_it_waited_for(name, futures):
    """The exit code and the log are those of the row, and no loader worker is left."""
    probe, run = PROBES[name], futures[name].result()
    assert run.code == probe.code and probe.never not in run.log, run.log
    for text in probe.says:
        assert text in run.log, (text, run.log)
    pids = [int(pid) for pid in re.findall(r"HANG \S+ pid (\d+)", run.log)]
    assert bool(pids) == ("HANG" in probe.source), run.log
    gone = lambda pid: (found := process_info(pid)) is None or found.dead  # noqa: E731 - a zombie is gone
    wait_for(lambda: all(map(gone, pids)), 30, f"end of {pids}")
