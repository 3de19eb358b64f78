"""From evidence to a cause: the table, row by row, on what real programs print and where real stacks stand."""

import re

import pytest
from monitor_evidence import crash, frames, hang, proc, rank

from monitor import causes
from monitor.evidence import late_rank

CAUSES = {
    "a worker that is stopped": (hang(processes=[proc(1, "S", True), proc(2, "T", ppid=1)]), "worker_stuck"),
    "a worker that sleeps": (hang(frames("queues.py:get", "dataloader.py:_try_get_data")), "worker_stuck"),
    "a loader deadline": (crash("RuntimeError: DataLoader timed out after 60 seconds"), "worker_stuck"),
    "a worker killed": (
        crash("RuntimeError: DataLoader worker (pid 71) is killed by signal: Killed."),
        "worker_killed",
    ),
    "npz stalled": (hang(frames("zipfile.py:read", "_npyio_impl.py:__getitem__")), "npz_stalled"),
    "an npz deadline": (crash(note="waited 30 s for cat_512_flux.npz", outcome="deadline"), "npz_stalled"),
    "npz corrupt": (crash("zipfile.BadZipFile: Bad CRC-32 for file 'latents.npy'"), "npz_corrupt"),
    "block swap": (hang(frames("threading.py:wait", "custom_offloading_utils.py:_wait_blocks_move")), "block_swap"),
    "CUDA after fork": (crash("RuntimeError: Cannot re-initialize CUDA in forked subprocess."), "cuda_after_fork"),
    "a late rank": (hang(ranks=[rank(0, 9), rank(1, 8)]), "collective"),
    "a barrier": (hang(frames("distributed_c10d.py:barrier")), "collective"),
    "a collective timeout": (crash("[rank0]: Watchdog caught collective operation timeout: WorkNCCL"), "collective"),
    "the tracker": (hang(frames("wandb_init.py:init"), phase="load"), "tracker_start"),
    "the hub": (hang(frames("socket.py:readinto", "file_download.py:http_get"), phase="load"), "hub"),
    "no network": (crash("LocalEntryNotFoundError: cannot find the file on the Hub", phase="load"), "hub"),
    "sampling": (hang(phase="sample"), "sampling"),
    "a slow save": (hang(phase="save"), "save_slow"),
    "an exit that hangs": (hang(outcome="done", phase="end"), "exit"),
    "CUDA memory": (crash("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"), "cuda_out_of_memory"),
    "host memory": (crash(signal=9, host={"oom_kills": 1}), "host_out_of_memory"),
    "host memory by the kernel's log": (
        crash(signal=9, kernel=["Out of memory: Killed process 71"]),
        "host_out_of_memory",
    ),
    "a killer": (crash(signal=9), "killed"),
    "a killer behind a launcher": (crash("died with <Signals.SIGKILL: 9>.", exit_code=1), "killed"),
    "a full disk": (crash("OSError: [Errno 28] No space left on device"), "disk_full"),
    "NaN": (crash("RuntimeError: NaN detected in loss at step 12"), "nan_loss"),
    "Xid": (
        crash("RuntimeError: CUDA error", kernel=["NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off"]),
        "gpu_lost",
    ),
    "a lost GPU": (crash("Unable to determine the device handle: GPU is lost."), "gpu_lost"),
    "a driver mismatch": (crash("Failed to initialize NVML: Driver/library version mismatch"), "driver_mismatch"),
    "a segfault": (crash(signal=11), "crashed_in_c"),
    "an exception": (crash("Traceback (most recent call last):\n  x\nKeyError: 'lora'"), "exception"),
    "a deadline inside": (crash(note="the next batch", outcome="deadline"), "deadline"),
    "D state": (hang(processes=[proc(1, "D", True, wchan="folio_wait_bit")]), "unkillable"),
    "SIGSTOP": (hang(processes=[proc(1, "T", True)]), "trainer_stopped"),
    "caching": (hang(phase="cache_latents", note="cat.png"), "caching"),
    "nothing known": (hang(frames("loop.py:one_step")), "stuck"),
    "silence": (crash(ended="exit code 1"), "no_last_word"),
}


@pytest.mark.parametrize("what", CAUSES)
def test_the_cause_of(what):
    evidence, name = CAUSES[what]
    cause = causes.match(evidence)
    assert cause.name == name
    assert cause.title and cause.explanation and "{" not in cause.title + cause.explanation + cause.advice


def test_every_cause_has_words_and_every_rung_of_a_ladder_exists():
    from runs.mitigate import MITIGATIONS

    for row in causes.table():
        assert row["title"][0].isupper() and row["explanation"].endswith((".", "}")), row["name"]
        assert set(row.get("ladder", ())) <= set(MITIGATIONS), row["name"]
        for pattern in (*row["match"].get("log", ()), *row["match"].get("note", ())):
            re.compile(pattern)
    assert causes.table()[-1]["match"] == {}


def test_the_launchers_own_error_does_not_hide_the_trainings():
    log = (
        "Traceback (most recent call last):\nValueError: the LoRA is empty\nTraceback (most recent call last):\n"
        "subprocess.CalledProcessError: Command '['python3', '-m', 'trainer']' returned non-zero exit status 1.\n"
    )
    assert causes.last_error(log) == "ValueError: the LoRA is empty"
    assert causes.last_error("") == "the log is empty"


def test_the_place_of_a_hang_is_the_ranks_not_a_workers():
    waits, works = frames("selectors.py:select"), frames("loop.py:one_step")
    found = hang(ranks=[rank(0), rank(1)], rank=1, stacks={50: waits, 101: works, 100: frames("loop.py:barrier")})
    assert found.where() == "one_step (loop.py:1)"
    assert "one_step" in causes.match(hang(ranks=[rank(0)], stacks={50: waits, 100: works})).explanation
    assert hang(ranks=[rank(0)], stacks={50: waits}).where() == ""
    assert hang(stacks={50: waits}).where() == "select (selectors.py:1)", "a script without ranks"


def test_the_late_rank_is_the_one_behind_or_the_one_elsewhere_or_the_one_silent_longest():
    assert late_rank([rank(0)]) is None
    assert late_rank([rank(0, 9), rank(1, 8), rank(2, 9)])["rank"] == 1
    assert late_rank([rank(0), rank(1), rank(2, phase="save")])["rank"] == 2
    assert late_rank([rank(0, silent=5.0), rank(1, silent=9.0)])["rank"] == 1
    assert late_rank([rank(0, silent=9.0), rank(1, silent=9.1)]) is None
