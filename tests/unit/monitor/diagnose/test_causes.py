"""The evidence on a failure and its cause: the table, row by row, on what real programs print and where real stacks stand.

Which rank is in question; what cannot be read is named; counters that do not compare are not compared.
"""

import json
import os
import re
import subprocess
import time
from dataclasses import asdict, replace

import pytest
from monitor_evidence import attempt, beat, crash, frames, hang, known, proc, rank

from guards.heartbeat import stacks_path
from monitor.detect.probe import Missing
from monitor.diagnose import causes, ranks, slow
from monitor.process import platform
from monitor.state import ExitStatus, Verdict
from runs.mitigate import MITIGATIONS

WAITS = frames("distributed_c10d.py:all_reduce", "other.py:wait_for_everyone")


def hung(scene, verdict=None, stacks=None, outcome="", note="", slow=""):
    verdict = verdict or Verdict("hung", 1, "step", 20, 9.0, 4.0, ("sleeping",))
    return causes.of_hang(known("hang"), scene, verdict, ended(None, outcome=outcome, note=note), stacks or {}, slow)


def ended(code, signal=None, outcome="running", note=""):
    return ExitStatus(code, signal, outcome, note, trained=False)


def test_exit_codes_and_outcomes():
    def done(*status):
        return ExitStatus(*status).done(foreign=False, killed=False)

    assert done(0, None, "", "", False), "a script without heartbeats"
    assert not done(0, None, "running", "", False), "exit code 0 alone does not count"
    assert done(1, None, "done", "", True), "a launcher's code is only a hint"
    assert "SIGKILL" in str(ended(137, 9))
    assert "waited for a batch" in str(ended(75, None, "deadline", "waited for a batch"))


# The phase in which rank 0 is stuck, its stack, and the cause; rank 1 waits for it in a collective operation.
STUCK = {
    "save": ("save", "safetensors.py:save_file", "save_slow"),
    "a cache file": ("step", "npz.py:__getitem__", "npz_stalled"),
    "a worker": ("step", "dataloader.py:_try_get_data", "worker_stuck"),
    "the tracker": ("load", "wandb_init.py:init", "tracker_start"),
    "cache_latents": ("cache_latents", "loop.py:encode", "caching"),
    "end": ("end", "loop.py:finish", "exit"),
    "a step": ("step", "loop.py:one_step", "collective"),
}


@pytest.mark.parametrize("what", STUCK)
def test_of_two_ranks_the_one_that_the_other_waits_for_decides_the_cause(what, tmp_path):
    phase, frame, cause = STUCK[what]
    two = attempt(tmp_path, beat(0, 20, phase, note="cat.png"), beat(1, 20, "step"))
    # The verdict is about rank 1: its phase has the shorter limit.
    found = hung(two, stacks={100: frames(frame), 101: WAITS})
    assert causes.match(found).name == cause
    assert (found.rank, found.phase, found.note) == (0, phase, "cat.png")
    if phase not in ranks.STEPS:
        assert causes.match(hung(two)).name == {"tracker_start": "loading"}.get(cause, cause), "no stacks"


def test_a_save_is_stuck_on_rank_0_although_all_ranks_are_in_that_phase(tmp_path):
    two = attempt(tmp_path, beat(0, 20, "save"), beat(1, 20, "save"))
    assert causes.match(hung(two, stacks={100: frames("safetensors.py:save_file"), 101: WAITS})).name == "save_slow"
    both = causes.match(hung(two, stacks={100: WAITS, 101: WAITS}))
    assert both.name == "collective" and "does not show which one was late" in both.explanation


def test_a_rank_that_gave_up_at_a_barrier_blames_the_save_that_it_waited_for(tmp_path):
    note = "waited 1800 s for all 2 ranks at a barrier (this is rank 1)"
    gave_up = beat(1, 20, "step", outcome="deadline", note=note)
    found = causes.of_crash(known("crash"), attempt(tmp_path, beat(0, 20, "save"), gave_up), ended(75))
    assert (found.kind, found.rank, found.phase) == ("crash", 0, "save")
    assert causes.match(found).name == "save_slow"
    found = causes.of_crash(known("crash"), attempt(tmp_path, beat(0, 20), gave_up), ended(75))
    assert causes.match(found).name == "collective"


def test_a_rank_that_waits_in_the_kernel_is_not_the_cause_unless_the_others_wait_for_it(tmp_path):
    found = hung(
        attempt(tmp_path, beat(0, 20, "step"), beat(1, 20, "step")), stacks={100: frames("a.py:b"), 101: WAITS}
    )
    facts = dict(ppid=1, name="p", wchan="", cpu_s=0.0, trainer=True, command="")
    found.processes = [{**facts, "pid": 100, "state": "S"}, {**facts, "pid": 101, "state": "D"}]
    assert causes.match(found).name == "collective"
    found.processes[0]["state"] = "D"
    assert causes.match(found).name == "unkillable"


def test_a_hang_of_one_rank_is_that_ranks(tmp_path):
    verdict = Verdict("hung", 0, "step", 22, 2.4, 2.2)
    found = hung(attempt(tmp_path, beat(0, 22, note="batch 3")), verdict, outcome="running")
    assert (found.phase, found.step, found.planned, found.stalled_s, found.budget_s) == ("step", 22, 40, 2.4, 2.2)
    assert found.outcome == "" and found.note == "batch 3" and found.ranks[0]["silent_s"] >= 9.0
    slow = hung(attempt(tmp_path, beat()), slow="waits for a busy disk")
    assert slow.signs == ["sleeping", "the run was slow before it hung: waits for a busy disk"]


def test_a_crash_is_that_of_the_rank_that_failed(tmp_path):
    (tmp_path / "x").mkdir()
    stacks_path(tmp_path, 101).write_text("old dump\nFatal Python error: Aborted\n\n" + frames("x.py:f"))
    two = attempt(tmp_path, beat(0, 20), beat(1, 19, outcome="failed", note="KeyError: 'x'"))
    found = causes.of_crash(known("crash"), two, ended(137, 9))
    assert (found.rank, found.step, found.outcome, found.note) == (1, 19, "failed", "KeyError: 'x'")
    assert found.signal is None, "the launcher killed the others"
    assert found.ended == "killed by SIGKILL; rank 1: failed (KeyError: 'x')"
    assert found.stacks[101].startswith("Fatal Python error: Aborted")
    alone = causes.of_crash(known("crash"), attempt(tmp_path), ended(None, 9, ""))
    assert (alone.phase, alone.step, alone.signal) == ("import", 5, 9)


def test_a_damaged_lora_is_about_the_run_and_not_about_a_rank(tmp_path):
    done = attempt(tmp_path, beat(0, 40, "end", outcome="done"))
    found = causes.of_crash(known("crash"), done, ended(0, None, "lora_damaged", "the LoRA x.safetensors is missing"))
    assert found.outcome == "lora_damaged" and causes.match(found).name == "lora_damaged"
    assert "the LoRA x.safetensors is missing" in causes.match(found).explanation


def test_a_living_process_is_described_without_heartbeats(tmp_path):
    process = subprocess.Popen(["sleep", "60"])
    try:
        while not platform.command_of(process.pid):
            time.sleep(0.01)  # between fork and exec
        members = {process.pid: platform.process_info(process.pid)}
        stacks = {1: frames("a.py:launcher"), process.pid: frames("b.py:trainer")}
        living = attempt(tmp_path, members=members)
        living.record = replace(living.record, root=(process.pid, members[process.pid].start))
        found = causes.of_process(known("hang"), living, ("sleeping",), stacks)
        assert found.where() == "trainer (b.py:1)", "that of the process in question, not of the first one"
        (one,) = found.processes
        assert one["trainer"] and one["name"] == "sleep" and one["state"] in ("S", "R") and "60" in one["command"]
    finally:
        process.kill()
        process.wait()
    gone = causes.process_facts(members, [process.pid], Missing())
    assert gone[0]["state"] == "" and gone[0]["command"] == ""


BROKEN = {
    "no /proc/meminfo (gVisor)": ("MEMINFO", "absent", "memory of the machine: No such file or directory"),
    "no kernel log": ("KMSG", "absent", "kernel log: No such file or directory"),
    "a kernel log that fails": ("KMSG", "/proc/self/mem", "kernel log: Input/output error"),
    "kernel records that do not parse": ("KMSG", "6,1,soon,-;Xid (PCI:0000:01:00): 79\n", "kernel log: unknown format"),
}


@pytest.mark.skipif(not platform.LINUX, reason="Linux only: /proc")
@pytest.mark.parametrize("what", BROKEN)
def test_evidence_that_cannot_be_read_is_named(what, tmp_path, monkeypatch):
    name, value, sentence = BROKEN[what]
    path = value
    if not value.startswith("/"):
        path = str(tmp_path / "file")
        if value != "absent":
            (tmp_path / "file").write_text(value)
    monkeypatch.setattr(causes, name, path)
    found = hung(attempt(tmp_path, beat()))
    assert any(missing.startswith(sentence) for missing in found.missing), found.missing
    assert found.kernel == [] and json.dumps(asdict(found))


def test_a_kernel_record_of_a_fault_is_kept_if_it_is_new(tmp_path, monkeypatch):
    record = tmp_path / "kmsg"
    monkeypatch.setattr(causes, "KMSG", str(record))
    record.write_text("4,812,9000000,-;NVRM: Xid (PCI:0000:01:00): 79, pid=71\n SUBSYSTEM=pci\n")
    missing = Missing()
    assert causes.kernel_lines(8.0, missing) == ["NVRM: Xid (PCI:0000:01:00): 79, pid=71"]
    assert causes.kernel_lines(10.0, missing) == [] == missing


def test_a_folder_and_stacks_that_are_gone_are_no_error(tmp_path):
    found = causes.of_crash(known("crash"), attempt(tmp_path / "absent", beat()), ended(1, None, ""))
    assert "free disk space: No such file or directory" in found.missing
    assert found.stacks == {} and "disk_free" not in found.host


def test_a_running_rank_without_stacks_is_named(tmp_path):
    me = platform.process_info(os.getpid())
    found = hung(attempt(tmp_path, beat(0, pid=me.pid), members={me.pid: me}))
    assert f"stack of rank 0 (pid {me.pid})" in found.missing


CGROUP, MACHINE = "/sys/fs/cgroup/memory.events", "/proc/vmstat"


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        ({MACHINE: 3}, {MACHINE: 4}, 1),
        ({MACHINE: 3}, {MACHINE: 3}, 0),
        ({CGROUP: 0, MACHINE: 7}, {CGROUP: 0, MACHINE: 9}, 0),  # killed in another container
        ({CGROUP: 0, MACHINE: 7}, {CGROUP: 1, MACHINE: 8}, 1),
        ({}, {MACHINE: 5}, None),  # an adopted attempt that was dead already: no baseline
        ({CGROUP: 0}, {MACHINE: 5}, None),  # the source changed
        ({MACHINE: 5}, {CGROUP: 2}, None),
        ({MACHINE: 5}, {MACHINE: 0}, 0),  # rebooted
    ],
)
def test_only_the_same_counter_is_compared(before, after, new, tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "oom_kills", lambda: after)
    killed = attempt(tmp_path, beat(), oom_kills=before)
    found = causes.of_crash(known("crash"), killed, ended(None, 9))
    assert found.host.get("oom_kills") == new
    found.kernel = []  # of this machine
    assert causes.match(found).name == ("host_out_of_memory" if new else "killed")
    assert any("lack of memory" in missing for missing in found.missing) == (new is None and platform.LINUX)


def test_the_counters_are_read_by_source(tmp_path, monkeypatch):
    (tmp_path / "memory.events").write_text("low 0\noom 2\noom_kill 2\noom_group_kill 0\n")
    (tmp_path / "vmstat").write_text("pswpin 4\noom_kill 11\nnr_free 3\n")
    counters = (str(tmp_path / "memory.events"), str(tmp_path / "vmstat"))
    monkeypatch.setattr(platform, "OOM_COUNTERS", counters)
    assert platform.oom_kills() == dict(zip(counters, (2, 11), strict=True))
    monkeypatch.setattr(platform, "OOM_COUNTERS", ("/proc/self/mem", str(tmp_path / "absent")))
    assert platform.oom_kills() == {}


LAUNCHER = (
    "Traceback (most recent call last):\n"
    '  File "/venv/bin/accelerate", line 8, in <module>\n    sys.exit(main())\n'
    '  File "/venv/lib/python3.11/site-packages/accelerate/commands/launch.py", line 800, in simple_launcher\n'
    "    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)\n"
    "subprocess.CalledProcessError: Command '['/venv/bin/python', '-m', 'sd_scripts_patches', 'flux_train_network.py']' "
)


def log(error: str, end: str = "returned non-zero exit status 1.") -> str:
    """A training's log as it is: a progress bar, a warning that has nothing to do with it, a traceback, the launcher's own."""
    return (
        "steps:   3%|▎         | 34/1000 [00:51<24:11,  1.50s/it, avr_loss=0.412]\r\n"
        "/venv/lib/python3.11/site-packages/torch/utils/checkpoint.py:87: UserWarning: None of the inputs have "
        "requires_grad=True. Gradients will be None\n"
        "Traceback (most recent call last):\n"
        '  File "/sd-scripts/train_network.py", line 1432, in train\n    for step, batch in enumerate(skipped_dataloader):\n'
        f"{error}\n{LAUNCHER}{end}\n"
    )


# The cause that must be found, and an error in the log as the program prints it.
CRASHES = [line.split(maxsplit=1) for line in """\
worker_stuck        RuntimeError: DataLoader timed out after 60 seconds
worker_killed       RuntimeError: DataLoader worker (pid 71) is killed by signal: Killed.
worker_killed       RuntimeError: DataLoader worker (pid(s) 71, 72) exited unexpectedly
shared_memory_full  RuntimeError: DataLoader worker (pid 71) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.
shared_memory_full  RuntimeError: unable to write to file </torch_71_12_0>: No space left on device (28)
npz_corrupt         ValueError: /d/cat_512_flux.npz is damaged (latents_64x64: Bad CRC-32 for file 'latents_64x64.npy'); renamed cat_512_flux.npz.bad
npz_corrupt         zipfile.BadZipFile: Bad CRC-32 for file 'latents.npy'
cuda_after_fork     RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method
collective          [rank0]:[E ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4012, OpType=ALLREDUCE)
collective          torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.
collective          RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete
tracker_start       wandb.errors.errors.CommError: Run initialization has timed out after 90.0 sec.
hub                 huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file on the Hub
hub                 requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /x
cuda_out_of_memory  torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 11.76 GiB
cuda_out_of_memory  RuntimeError: CUDA error: out of memory
disk_full           safetensors_rust.SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)
disk_full           RuntimeError: PytorchStreamWriter failed writing file data/12: file write failed
disk_full           OSError: [Errno 122] Disk quota exceeded: '/home/u/outputs/x-state/model.safetensors'
nan_loss            trainer.errors.TrainError: the loss of step 12 is nan: training stops here, nothing of it is saved
nan_loss            sd_scripts_patches.save.NotSaved: x.safetensors is not saved: 3 of 304 trained tensors hold NaN or infinity (lora_unet_double_blocks_0 first)
nan_encoded         RuntimeError: NaN detected in latents: /d/cat.png
cuda_error          RuntimeError: CUDA error: an illegal memory access was encountered
gpu_lost            RuntimeError: CUDA error: unspecified launch failure
gpu_lost            RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment
exception           KeyError: 'lora_unet'
""".splitlines()]  # fmt: skip
PHASES = {"tracker_start": "load"}  # where that one happens; the others in a step

FOUND = {
    **{error: (crash(log(error), exit_code=1, phase=PHASES.get(name, "step")), name) for name, error in CRASHES},
    # ---- dead, and the machine or the training's own error says why ----
    "a LoRA that is not there": (
        crash(outcome="lora_damaged", exit_code=0, note="the LoRA toy.safetensors is missing", phase="end"), "lora_damaged"),
    "a rank whose peer is gone": (
        crash(outcome="failed", note="RuntimeError: [third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
        "rank_lost"),
    "a flag that argparse rejects": (
        crash("usage: flux_train_network.py [-h]\nflux_train_network.py: error: argument --seed: invalid int value: 'x'\n",
              exit_code=2, phase="import"), "usage_error"),
    "a flag that argparse rejects, behind a launcher": (
        crash("t.py: error: unrecognized arguments: --bogus\n" + LAUNCHER + "returned non-zero exit status 2.\n",
              exit_code=1, phase="import"), "usage_error"),
    "a flag that the built-in trainer rejects": (
        crash("error: --max_train_steps 0: must be at least 1\n", exit_code=2, phase="import"), "usage_error"),
    "a flag that argparse rejects, behind a launcher with a long command": (
        crash("t.py: error: unrecognized arguments: --bogus\nsubprocess.CalledProcessError: Command '['python', '"
              + "x" * 9000 + "']' returned non-zero exit status 2.\n", exit_code=1, phase="import"), "usage_error"),
    "a script with a syntax error": (
        crash("train.sh: line 7: syntax error near unexpected token `fi'\n", exit_code=2, phase="import"), "script_broken"),
    "a training script that is not there": (
        crash("/venv/bin/python: can't open file '/sd-scripts/flux_train_network.py': [Errno 2] No such file or directory\n",
              exit_code=2, phase="import"), "cannot_start"),
    "a training script that is not there, on Windows": (
        crash("C:\\v\\Scripts\\python.exe: can't open file 'C:\\\\x.py': [Errno 2] No such file or directory\n", exit_code=2),
        "cannot_start"),
    "a training script that is not there, behind a launcher": (
        crash("python3.11: can't open file '/m/zimage_train_network.py': [Errno 2] No such file or directory\n" + LAUNCHER
              + "returned non-zero exit status 2.\n", exit_code=1, phase="import"), "cannot_start"),
    "a training script that is not there, behind the guards": (
        crash("sd_scripts_patches: /sd-scripts/flux_train_network.py: script not found\n", exit_code=2), "cannot_start"),
    "a trainer that is not installed": (
        crash("/venv/bin/python3: No module named trainer\n", exit_code=1, phase="import"), "cannot_start"),
    "no accelerate's own flag": (
        crash("accelerate <command> [<args>] launch: error: unrecognized arguments: --x\n", exit_code=2), "usage_error"),
    "host memory": (crash(signal=9, host={"oom_kills": 1}), "host_out_of_memory"),
    "host memory, by the kernel's log": (
        crash(signal=9, kernel=["Out of memory: Killed process 71 (python) total-vm:31250000kB"]), "host_out_of_memory"),
    "host memory, behind a launcher": (
        crash(log("", "died with <Signals.SIGKILL: 9>."), exit_code=1, host={"oom_kills": 1}), "host_out_of_memory"),
    "a killer": (crash(signal=9), "killed"),
    "a killer behind a launcher": (crash(log("", "died with <Signals.SIGKILL: 9>."), exit_code=1), "killed"),
    "a segfault": (crash(signal=11, stacks={7: "Fatal Python error: Segmentation fault\n\n" + frames("x.py:f")}), "crashed_in_c"),
    "a segfault behind a launcher": (crash(log("", "died with <Signals.SIGSEGV: 11>."), exit_code=1), "crashed_in_c"),
    "an illegal instruction": (crash(signal=4), "illegal_instruction"),
    "an illegal instruction behind a launcher": (crash(log("", "died with <Signals.SIGILL: 4>."), exit_code=1), "illegal_instruction"),
    "a driver that was changed": (
        crash(log("Failed to initialize NVML: Driver/library version mismatch"), phase="import"), "driver_mismatch"),
    "a driver that is too old": (
        crash(log("RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."), phase="load"),
        "driver_mismatch"),
    "a GPU that this PyTorch does not know": (
        crash(log("RuntimeError: CUDA error: no kernel image is available for execution on the device"), phase="load"),
        "driver_mismatch"),
    "Xid 79": (
        crash(log("RuntimeError: CUDA error"), kernel=["NVRM: Xid (PCI:0000:01:00): 79, pid=71, GPU has fallen off the bus."]),
        "gpu_lost"),
    "no accelerate": (crash("train.sh: line 9: accelerate: command not found", exit_code=127, phase="import"), "cannot_start"),
    "an npz deadline": (
        crash(note="waited 30 s for latents_64x64 of /nfs/cat_512_flux.npz", outcome="deadline"), "npz_stalled"),
    "an npz read given up": (
        crash(note="TimeoutError: waited 30 s for values of /nfs/cat.npz", outcome="failed", exit_code=1), "npz_stalled"),
    "an image deadline": (crash(note="waited 30 s for image /nfs/cat.png", outcome="deadline"), "image_stalled"),
    "a batch deadline": (
        crash(note="waited 60 s for batch 35 of the data loader from worker 1 (pid 72)", outcome="deadline"), "worker_stuck"),
    "a block deadline": (
        crash(note="waited 30 s for block 3 of 19 to be swapped in (block swap, 18 blocks)", outcome="deadline"), "block_swap"),
    "a barrier deadline": (
        crash(note="waited 1800 s for all 2 ranks at a barrier (this is rank 0, phase save)", outcome="deadline"), "collective"),
    "a download deadline": (
        crash(note="waited 300 s for a byte of ae.safetensors of x/y from the hub", outcome="deadline", phase="load"), "hub"),
    "a sample deadline": (
        crash(note="waited 600 s for sample image 2 (one step hangs)", outcome="deadline", phase="sample"), "sampling"),
    "a save deadline": (crash(note="waited 900 s for writing x-state", outcome="deadline", phase="save"), "save_slow"),
    "another deadline": (crash(note="waited 10 s for the moon", outcome="deadline"), "deadline"),
    "a stray SIGTERM": (crash(signal=15), "terminated"),
    "a stray SIGTERM, honored with a checkpoint": (crash(outcome="stopped", exit_code=3), "terminated"),
    "sampling fails": (crash(log("ValueError: no such sampler"), phase="sample"), "sampling"),
    "silence": (crash(ended="exit code 1"), "exited_unexpectedly"),
    # ---- stuck ----
    "a worker that is stopped": (hang(processes=[proc(1, "S", True), proc(2, "T", ppid=1)]), "worker_stuck"),
    "a worker that sleeps": (
        hang(frames("threading.py:wait", "queue.py:get", "dataloader.py:_try_get_data", "dataloader.py:_get_data")),
        "worker_stuck"),
    "npz stalled": (hang(frames("zipfile.py:read", "_npyio_impl.py:__getitem__", "npz.py:__getitem__")), "npz_stalled"),
    "block swap": (
        hang(frames("threading.py:wait", "_base.py:result", "custom_offloading_utils.py:_wait_blocks_move")), "block_swap"),
    "a late rank": (hang(ranks=[rank(0, 9), rank(1, 8)]), "collective"),
    "a barrier": (hang(frames("distributed_c10d.py:barrier", "other.py:wait_for_everyone")), "collective"),
    "the tracker": (hang(frames("wandb_init.py:init", "tracking.py:store_init_configuration"), phase="load"), "tracker_start"),
    "the hub": (hang(frames("socket.py:readinto", "file_download.py:http_get"), phase="load"), "hub"),
    "sampling": (hang(phase="sample"), "sampling"),
    "validation": (hang(phase="validate"), "validation"),
    "a slow save": (hang(phase="save"), "save_slow"),
    "an exit that hangs": (hang(outcome="done", phase="end"), "exit"),
    "a tracker's end": (hang(frames("tracking.py:finish"), phase="end"), "tracker_start"),
    "an end that hangs": (hang(frames("loop.py:finish"), phase="end"), "exit"),
    "an error and no exit": (hang(outcome="failed", note="KeyError: 'x'"), "exception"),
    "a GPU lost under way": (hang(kernel=["NVRM: Xid (PCI:0000:01:00): 79, pid=71"]), "gpu_lost"),
    "D state": (hang(processes=[proc(1, "D", True, wchan="folio_wait_bit")]), "unkillable"),
    "SIGSTOP": (hang(processes=[proc(1, "T", True)]), "trainer_stopped"),
    "caching": (hang(phase="cache_latents", note="cat.png"), "caching"),
    "loading": (hang(phase="load"), "loading"),
    "a kernel that never ends": (hang(frames("loop.py:one_step"), processes=[proc(71, "S", True)], gpu=[{"utilization": 100, "pids": [71]}]), "gpu_endless"),
    "another program's kernel": (hang(frames("loop.py:one_step"), processes=[proc(71, "S", True)], gpu=[{"utilization": 100, "pids": [9]}]), "stuck"),
    "an idle GPU": (hang(frames("loop.py:one_step"), processes=[proc(71, "S", True)], gpu=[{"utilization": 3, "pids": [71]}]), "stuck"),
    "nothing known": (hang(frames("loop.py:one_step")), "stuck"),
}  # fmt: skip

# What only looks like a cause: an innocent word, another thread, an older line.
INNOCENT = {
    "a module that is missing in the training": (
        crash(log("ModuleNotFoundError: No module named 'prodigyopt'"), exit_code=1), "exception"),
    "a tracker's thread always waits": (
        hang(frames("queue.py:get", "trackers.py:_run", main=False) + "\n\n" + frames("loop.py:one_step")), "stuck"),
    "a worker's stack is not the trainer's": (
        hang(ranks=[rank(0)], stacks={100: frames("loop.py:one_step"), 50: frames("zipfile.py:read")}), "stuck"),
    "another program ran out of memory": (
        crash(log("KeyError: 'lora'"), exit_code=1, host={"oom_kills": 1}), "exception"),
    "an Xid that every ended program leaves": (
        hang(kernel=["NVRM: Xid (PCI:0000:01:00): 45, pid=71, Ch 00000008"]), "stuck"),
    "a driver's warning long before": (
        crash("UserWarning: CUDA initialization: The NVIDIA driver on your system is too old\n" + log("KeyError: 'x'")),
        "exception"),
    "wandb complained an hour ago": (crash("wandb: ERROR Error while calling W&B API\n" + log("KeyError: 'x'")), "exception"),
    "an old out of memory that was survived": (
        crash("CUDA out of memory, trying again\n" + "steps 1\n" * 400 + log("KeyError: 'x'")), "exception"),
    "a file that is not finite-looking": (crash(log("ValueError: the schedule is not finite-state")), "exception"),
    "a worker in D state for a moment": (
        hang(frames("loop.py:one_step"), processes=[proc(1, "S", True), proc(2, "D", ppid=1)]), "stuck"),
    "an error line of a run that did not reject its flags": (crash("error: the disk is slow\n", exit_code=1), "exception"),
    "exit code 2 without a message": (crash("steps 1\n", exit_code=2), "exited_unexpectedly"),
    "an npz that is only named": (crash(note="KeyError: 'cat.npz'", outcome="failed", exit_code=1), "exited_unexpectedly"),
}  # fmt: skip


@pytest.mark.parametrize("what", [*FOUND, *INNOCENT])
def test_the_cause_of(what):
    evidence, name = {**FOUND, **INNOCENT}[what]
    cause = causes.match(evidence)
    assert cause.name == name
    assert cause.title and cause.explanation and "{" not in cause.title + cause.explanation + cause.advice


def test_every_row_of_the_table_is_matched_by_one_of_these():
    met = [causes.row_of(evidence) for evidence, _ in FOUND.values()]
    assert [row["title"] for row in causes.TABLE if row not in met] == []


def test_the_explanation_shows_the_trainings_error_and_not_the_launchers():
    for _, error in CRASHES:
        shown = causes.match(FOUND[error][0]).explanation
        assert error[:60].removeprefix("[rank0]:") in shown and not shown.endswith(".."), (error, shown)
    short = crash("Traceback (most recent call last):\nValueError: the LoRA is empty\n" + LAUNCHER + "returned 1.\n")
    assert causes.match(short).explanation == "The error was: ValueError: the LoRA is empty."
    assert causes.match(crash("error: the disk is slow\n")).explanation == "The error was: the disk is slow."
    assert "The last line of the log: the log is empty." in causes.match(crash()).explanation


def test_what_can_never_start_is_explained_by_its_own_message_and_not_restarted():
    own = r"(t\.py: |flux_train_network\.py: )?error: (argument --seed|unrecognized|--max_train_steps)"
    for what, (evidence, _) in FOUND.items():
        cause = causes.match(evidence)
        if "rejects" in what:
            assert not cause.restart and re.match(own, cause.explanation), what
        elif what.startswith("a training script that is not there"):
            assert not cause.restart and ".py" in cause.explanation and "start.sh" in cause.advice, what


def test_a_damaged_lora_restarts_from_the_newest_checkpoint():
    cause = causes.match(FOUND["a LoRA that is not there"][0])
    assert cause.restart and "but the LoRA toy.safetensors is missing." in cause.explanation


def test_every_cause_is_a_sentence_and_every_mitigation_exists():
    for row in causes.TABLE:
        assert row["title"][0].isupper() and row["explanation"].endswith((".", "}")), row["name"]
        assert set(row.get("ladder", ())) <= set(MITIGATIONS), row["name"]
        for pattern in (*row["match"].get("log", ()), *row["match"].get("note", ())):
            re.compile(pattern)
    assert causes.TABLE[-1]["match"] == {}
    used = {name for row in (*causes.TABLE, *slow.TABLE) for name in row.get("ladder", ())}
    assert used == set(MITIGATIONS), "a mitigation that no cause uses"
    of = {row["name"]: row.get("ladder", ()) for row in reversed(causes.TABLE)}
    expected = {"worker_killed": "workers_0", "npz_corrupt": "cache_aside", "block_swap": "no_block_swap"}
    assert [name for name, change in expected.items() if change not in of[name]] == []


def test_a_hang_is_located_by_the_rank_and_not_by_a_worker():
    waits, works = frames("selectors.py:select"), frames("loop.py:one_step")
    found = hang(ranks=[rank(0), rank(1)], rank=1, stacks={50: waits, 101: works, 100: frames("loop.py:barrier")})
    assert found.where() == "one_step (loop.py:1)"
    assert "one_step" in causes.match(hang(ranks=[rank(0)], stacks={50: waits, 100: works})).explanation
    assert hang(ranks=[rank(0)], stacks={50: waits}).where() == ""
    assert hang(stacks={50: waits}).where() == "select (selectors.py:1)", "a script without ranks"


def test_a_log_made_of_what_the_patterns_look_for_takes_no_time_worth_mentioning():
    for part in (".npz", "huggingface.co ", "gloo", "waited ", "Error: ", "a: "):
        began = time.process_time()
        causes.match(crash(part * (65536 // len(part)), note=part * 40))
        assert time.process_time() - began < 5.0, part


@pytest.mark.parametrize(
    ("end", "wanted"),
    [
        ("died with <Signals.SIGABRT: 6>.", "its launcher reports SIGABRT"),
        ("returned non-zero exit status 3.", "its launcher reports exit code 3"),
    ],
)
def test_where_only_the_launcher_says_something_its_command_is_left_out(end, wanted):
    assert wanted in causes.match(crash(LAUNCHER + end, exit_code=1)).explanation
