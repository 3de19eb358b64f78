"""The second opinion on a silent run: what two samples of its processes say together."""

import subprocess
import sys
import time

from monitor import signals, system
from monitor.signals import One, Sample

TRAINER, WORKER = (1, 10.0), (2, 11.0)


def sample(at: float, trainer: One, worker: One | None = None, stacks_text: str = "same", **more) -> Sample:
    processes = {TRAINER: trainer} | ({WORKER: worker} if worker else {})
    return Sample(at, processes, stacks=stacks_text, **more)


def one(state: str = "S", cpu: float = 0.0, **more) -> One:
    return One(state, "python", cpu, more.pop("faults", 0), **more)


def compare(first: Sample, second: Sample, **more) -> signals.Signals:
    return signals.compare(first, second, [1], **more)


def test_asleep_twice_on_the_same_stack_without_cpu_speaks_for_a_hang():
    found = compare(sample(0, one()), sample(2, one()))
    assert "same stack twice" in found.stuck[0] and not found.slow


def test_a_busy_loop_on_the_same_stack_says_nothing_either_way():
    found = compare(sample(0, one("R")), sample(2, one("R", cpu=2.0)))
    assert found.stuck == found.slow == () and "1.0 processor cores" in found.busy[0]


def test_asleep_on_changing_stacks_says_nothing():
    assert compare(sample(0, one()), sample(2, one(), stacks_text="other")) == signals.Signals()


def test_a_stopped_worker_speaks_for_a_hang_whatever_the_trainer_does():
    found = compare(sample(0, one("R"), one("T")), sample(2, one("R", cpu=2.0), one("T")))
    assert "stopped by a signal" in found.stuck[0]


def test_reading_files_is_slow_not_stuck():
    found = compare(sample(0, one("D")), sample(2, one("D", disk_bytes=10_000_000)))
    assert "MB/s" in found.slow[0] and not found.stuck


def test_a_disk_that_gives_nothing_is_stuck():
    found = compare(sample(0, one("D")), sample(2, one("D", wchan="folio_wait_bit")))
    assert any("uninterruptible" in s and "folio_wait_bit" in s for s in found.stuck)


def test_a_disk_that_others_keep_busy_is_slow_and_one_that_is_dead_is_stuck():
    def waiting(at: float, disks: dict, wchan: str = "folio_wait_bit_common") -> Sample:
        return sample(at, one("D", wchan=wchan), disks=disks)

    before = {"vda": (1000, 10.0), "vda1": (900, 9.0)}
    busy = compare(waiting(0, before), waiting(2, {"vda": (21000, 11.9), "vda1": (900, 9.0)}))
    assert busy.slow == ("waits for a busy disk: vda, 5.1 MB/s for all programs together",)
    dead = compare(waiting(0, before), waiting(2, {"vda": (1000, 12.0), "vda1": (900, 9.0)}))
    assert any("uninterruptible" in s for s in dead.stuck) and not dead.slow, "at work all the time, and nothing done"
    frozen = {"vda": (21000, 11.9)}
    assert not compare(waiting(0, before, "percpu_rwsem_wait"), waiting(2, frozen, "percpu_rwsem_wait")).slow


def test_this_machines_disks_are_read():
    taken = signals.take([])
    assert all(moved >= 0 and at_work_s >= 0 for moved, at_work_s in taken.disks.values())


def test_swapping_throttling_and_a_busy_machine_are_slow():
    swapping = compare(sample(0, one("D")), sample(2, one("D", cpu=1.0, faults=500), swapped_pages=5000))
    assert "swapping" in swapping.slow[0]
    hot = ({"utilization": 99, "throttle": "too hot"},)
    throttled = compare(sample(0, one("R")), sample(2, one("R", cpu=2.0), gpu=hot))
    assert "throttled" in throttled.slow[0]
    spilled = ({"utilization": 99, "spill": True, "memory_used": 99, "memory_total": 100},)
    assert "spills" in compare(sample(0, one("R")), sample(2, one("R", cpu=2.0), gpu=spilled)).slow[0]
    busy = sample(2, one("R", cpu=0.8, starved_s=1.2))
    assert "keep the processor busy" in compare(sample(0, one("R")), busy).slow[0]
    assert compare(sample(0, one("R")), busy, enough_cpu=True).slow == (), "it had the time of many steps"


def test_samples_of_living_processes_tell_a_sleeper_from_a_spinner():
    ready = "print('ready', flush=True)\n"
    programs = {"sleeps": f"import time\n{ready}time.sleep(600)", "spins": f"{ready}while True: pass"}
    children = {
        name: subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for name, code in programs.items()
    }
    try:
        for child in children.values():
            child.stdout.readline()
        keys = {name: (c.pid, system.proc(c.pid).start) for name, c in children.items()}
        first = {name: signals.take([key]) for name, key in keys.items()}
        time.sleep(1.0)
        found = {n: signals.compare(first[n], signals.take([keys[n]]), [keys[n][0]], enough_cpu=True) for n in keys}
    finally:
        for child in children.values():
            child.kill()
            child.communicate()
    assert any("no CPU time used" in s for s in found["sleeps"].stuck)
    assert found["spins"].stuck == found["spins"].slow == ()
