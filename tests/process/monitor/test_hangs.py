"""The known hangs of training programs, as the monitor sees them: a real process that stands where they stand.

Rows of the list of known hangs (the numbers are its own) and where each is tested:
1 block swap, 2 loader worker, 3 npz on a dead disk, 10/14 validation, 11 the first step, 18 tracker start, 20 a late rank,
22 hub, 23 collective, 24 sampling, 27 save, 28 exit, 29 tracker end: here. 4 corrupt npz, 30 full pipe, 31 orphan, worker
processes that really hang: the fault matrix. 9 a script without heartbeats, 16 strays, 33 exit code 0: test_monitor_run.
15 CUDA after fork: test_monitor_ladder. 5-8, 12, 13, 17, 19, 21, 25, 26, 32 and 34 are not the monitor's to see.
"""

import sys

import psutil
import pytest
from monitor_helpers import (
    ROOT,
    STAND,
    fault_at,
    in_time,
    incidents,
    limits_file,
    report,
    status,
    supervise,
    toy_run,
    trainers,
    undisturbed,
    weight,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="stacks are asked for by a signal")
SHORT = dict(steps=50, pace=0.03, every=10)
AT = 34
POOL = """
def pool_of_a_tracker():
    import threading
    threading.Thread(target=stand, args=("trackers.py:_run",), daemon=True).start()

"""
PHASES = ("import", "load", "cache_latents", "cache_text", "first_step", "sample", "validate", "save", "end")
LIMITS = "".join(f"[phases.{name}]\nfloor_s = 2\nceiling_s = 4\n" for name in PHASES) + "[watch]\nwarmup_floor_s = 2\n"


def at_step(code: str) -> str:
    return STAND + POOL + fault_at(AT, code)


def before(phase: str, code: str) -> str:
    return STAND + f'if attempt == 1:\n    hb.phase("{phase}")\n    {code}\n'


# Row -> (what the toy does, the cause that must be told, the phase that must be told)
HANGS = {
    "1 block swap": (
        at_step("stand('flux_models.py:forward', 'custom_offloading_utils.py:_wait_blocks_move', '_base.py:result')"),
        "block_swap", "step"),
    "2 a loader worker": (
        at_step("stand('dataloader.py:_next_data', 'dataloader.py:_get_data', 'dataloader.py:_try_get_data', 'queues.py:get')"),
        "worker_stuck", "step"),
    "3 npz on a dead disk": (
        at_step("stand('train_util.py:__getitem__', '_npyio_impl.py:__getitem__', 'zipfile.py:read')"), "npz_stalled", "step"),
    "10 validation": (at_step("hb.phase('validate', 8); stand('train_network.py:validate')"), "validation", "validate"),
    "11 the first step": (before("first_step", "stand('trainer.py:train')"), "stuck", "first_step"),
    "18 tracker start": (before("load", "stand('train_util.py:init_trackers', 'wandb_init.py:init')"), "tracker_start", "load"),
    "22 hub": (before("load", "stand('hub.py:cached_file', 'file_download.py:http_get', 'ssl.py:read')"), "hub", "load"),
    "24 sampling": (at_step("hb.phase('sample', 2); hb.item(1); stand('flux_train_utils.py:denoise')"), "sampling", "sample"),
    "27 a save": (at_step("hb.phase('save'); stand('serialization.py:save_file')"), "save_slow", "save"),
    "29 tracker end": (
        at_step("hb.phase('end'); stand('accelerator.py:end_training', 'tracking.py:finish')"), "tracker_start", "end"),
    "caching": (before("cache_latents", "hb.item(1, 'cat.png'); stand('strategy_flux.py:cache_batch_latents')"), "caching", "cache_latents"),
    "nothing of these, beside a tracker's waiting thread": (
        at_step("pool_of_a_tracker(); stand('network.py:forward')"), "stuck", "step"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    yield tmp_path / "toy"
    for pid in trainers(tmp_path / "toy"):  # a test that failed must leave nothing behind
        psutil.Process(pid).kill()


@pytest.mark.parametrize("row", HANGS)
def test_a_hang_in(row, folder):
    """… is caught in its own phase, explained by its own cause, and the run finishes as an undisturbed one."""
    faults, cause, phase = HANGS[row]
    toy_run(folder, faults, **SHORT)
    assert supervise(folder, HANGPROOF_LIMITS=str(limits_file(folder, LIMITS)))[0] == 0
    (incident,) = incidents(folder)
    assert (incident["kind"], incident["cause"], incident["phase"]) == ("hang", cause, phase)
    assert in_time(folder, incident)
    assert status(folder)["restarts"] == 1 and weight(folder) == undisturbed(SHORT["steps"])
    assert f"# {incident['title']}" in report(folder)


RANKS = f"""
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from guards import checkpoint, crash
from guards.heartbeat import Heartbeat
run, rank, attempt = Path(os.environ["HANGPROOF_RUN"]), int(os.environ["RANK"]), int(os.environ["HANGPROOF_ATTEMPT"])
meet = run / f"meet-{{attempt}}"
meet.mkdir(exist_ok=True)
hb = Heartbeat.from_env()
crash.install(hb)

def barrier(step):
    (meet / f"{{rank}}-{{step}}").touch()
    while not (meet / f"{{1 - rank}}-{{step}}").exists():
        time.sleep(0.005)

hb.plan(50)
hb.phase("first_step")
for step in range(1, 51):
    time.sleep(0.02)
    if attempt == 1 and rank == 1 and step == 35:
        FAULT
    barrier(step)
    hb.step(step)
if rank == 0:
    checkpoint.atomic_write(run / "toy.safetensors", "done")
hb.end("done")
crash.exit_now(0)
"""
LATE = {
    "sleeps": ("time.sleep(3600)", "hang", "collective"),
    "is stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "hang", "trainer_stopped"),
    "fails": ("raise ValueError('only here')", "crash", "exception"),
}


@pytest.mark.parametrize("how", LATE)
def test_one_rank_of_two_that(how, folder):
    """… holds the other up: the right one is named, both are ended, and the group starts again."""
    fault, kind, cause = LATE[how]
    folder.mkdir()
    (folder / "toy.py").write_text(RANKS.replace("FAULT", fault))
    start = f"WORLD_SIZE=2 {sys.executable} toy.py"
    # As torchrun does: the first that fails ends the group.
    (folder / "train.sh").write_text(
        f"cd {folder}\nRANK=0 {start} & a=$!\nRANK=1 {start} & b=$!\n"
        "wait -n; code=$?\n[ $code = 0 ] || kill -9 $a $b 2>/dev/null\nwait $a && wait $b\n"
    )
    assert supervise(folder, HANGPROOF_LIMITS=str(limits_file(folder, "[watch]\nwarmup_floor_s = 2\n")))[0] == 0
    (incident,) = incidents(folder)
    assert (incident["kind"], incident["cause"]) == (kind, cause)
    text = report(folder)
    if kind == "hang":
        assert incident["step"] == 34 and len(incident["evidence"]["ranks"]) == 2
        assert "Rank 0 (pid" in text and "Rank 1 (pid" in text
    if how == "sleeps":
        assert "The other ranks were waiting for rank 1." in text
    if how == "fails":
        assert "only here" in text
    assert status(folder)["state"] == "completed" and trainers(folder) == []
