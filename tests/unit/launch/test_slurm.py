"""`python -m launch slurm` without Slurm: the script as text, and what is said where something is missing."""

import json
import os
import re
import shlex
import shutil
import subprocess

import psutil
import pytest
from launch_helpers import arguments
from monitor_helpers import STATUS, toy_run, wait_for
from runs_helpers import call, executable, pictures, spec

import runs
from launch import slurm
from launch.common import LaunchError
from monitor.process.platform import LOCK, Lock
from monitor.run_folder import RunFolder

SHORT = dict(steps=60, pace=0.05, every=20)


def rendered(folder, made, *words):
    """The script that the command writes for a run, None for one with a script of its own."""
    args = arguments(slurm, *words)
    slurm.complete(made, args)
    return slurm.render(folder, made, args)


def launch(folder, *words, code=0, path):
    """The command with this PATH: its line of JSON, or its standard error where it has to fail."""
    done = call("launch", "slurm", folder, "--json", *words, PATH=path)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else json.loads(done.stdout.splitlines()[-1])


def as_options(words):
    return dict(word.removeprefix("--").partition("=")[::2] for word in words)


def options(text):
    """The #SBATCH lines as bash reads their words: {option: value}."""
    return as_options(word for line in re.findall(r"^#SBATCH (.*)$", text, re.M) for word in shlex.split(line))


def test_the_script_asks_for_what_the_run_needs(data, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no Slurm
    made = runs.create(spec(gpus=2, nodes=3, workers=2, name="Me & my cat"), pictures(data / "photos"))
    given = ("--partition=a b", "--time=1-12", "--account=me", "--mem=64G")
    text = rendered(made, runs.load(made), *given)
    words = ["--open-mode=append", "--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=6", "--gpus-per-node=2"]
    words += [
        f"--job-name={slurm.job_name(made)}",
        "--signal=B:TERM@120",
        "--dependency=singleton",
        "--requeue",
        *given,
    ]
    assert options(text) == as_options([*words, f"--output={made}/slurm-%j.log"])
    assert "# Trains Me & my cat under Slurm" in text
    assert f"export HANGPROOF_DATA={data}" in text


@pytest.mark.parametrize(
    ("fields", "words", "gpus", "cpus"),
    [
        ({"model": "tiny-flux", "workers": 3}, [], "", "4"),  # trains on the CPU
        ({"model": "tiny-flux"}, ["--gpus-type", "t4"], "t4:1", "3"),
        ({"gpus": 2, "workers": 1}, ["--gpus-type", "a100"], "a100:2", "4"),
        ({"gpus": 2}, ["--gpus", "4", "--cpus", "8"], "4", "8"),
        ({}, ["--gpus", "0"], "", "3"),
    ],
)
def test_the_gpus_are_those_of_the_run_or_what_its_user_says(fields, words, gpus, cpus, data):
    made = spec(**{"workers": 2, **fields})
    text = rendered(data / "run", made, *words)
    assert options(text).get("gpus-per-node", "") == gpus and options(text)["cpus-per-task"] == cpus
    needed = made.model != "tiny-flux"
    assert ("export HANGPROOF_NEEDS_GPU=1" in text) == needed, "a node with a broken GPU does not train on its CPU"
    with pytest.raises(LaunchError, match="not negative"):
        rendered(data / "run", made, "--gpus=-1")


@pytest.mark.parametrize("nodes", [1, 2])
def test_bash_accepts_the_script(nodes, tmp_path):
    folder = tmp_path / 'it\'s a "run" for $5 #1; ünï'
    text = rendered(folder, None, "--nodes", str(nodes))
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert options(text)["output"] == f"{folder}/slurm-%j.log"
    names = {options(rendered(tmp_path / data / "a,b", None))["job-name"] for data in ("one", "two")}
    assert len(names) == 2 and all(re.fullmatch(r"hangproof-a-b-\w{8}", name) for name in names), names
    assert ("export HANGPROOF_NODE=" in text) == ("HANGPROOF_MAIN_PORT" in text) == ("$starts" in text) == (nodes == 2)


def job_that_ends_with_5(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name, does in (("srun", "exit 5"), ("squeue", "echo RUNNING n1"), ("scontrol", ":")):
        executable(tmp_path / name, f"#!/bin/sh\n{does}\n")
    return folder, {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock: Linux")
@pytest.mark.parametrize("why", ["preempted", "another machine still trains this run"])
def test_a_job_that_waits_for_an_earlier_node_is_requeued_at_a_warning_or_after_ten_minutes(why, tmp_path):
    folder, env = job_that_ends_with_5(tmp_path)
    executable(tmp_path / "srun", "#!/bin/sh\necho trains\n")
    lock = Lock(folder / LOCK)
    assert lock.acquire()
    script = rendered(folder, None).replace("--timeout 600", "--timeout 60" if why == "preempted" else "--timeout 1")
    job = subprocess.Popen(["bash", "-c", script], env=env, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: [p for p in psutil.Process(job.pid).children() if p.name() == "flock"], what="its wait")
    if why == "preempted":
        job.terminate()
    assert job.wait(20) == 5
    lock.release()
    assert job.stdout.read() == f"hangproof: {why}; requeueing job 7\n", "it does not train"


def test_a_warning_reaches_the_training_also_while_slurm_still_delivers_it(tmp_path):
    folder, env = job_that_ends_with_5(tmp_path)
    pid = tmp_path / "pid"
    executable(tmp_path / "srun", f"#!/bin/sh\ntrap 'exit 5' TERM\necho $$ >{pid}\nsleep 60 &\nwait\n")
    executable(tmp_path / "scancel", f"#!/bin/sh\nkill $(cat {pid})\n")
    for name, does in (("squeue", "echo SIGNALING n1"), ("flock", ":")):
        executable(tmp_path / name, f"#!/bin/sh\n{does}\n")
    job = subprocess.Popen(["bash", "-c", rendered(folder, None)], env=env, stdout=subprocess.DEVNULL)
    wait_for(lambda: pid.exists() and pid.read_text(), what="its training")
    job.terminate()
    assert job.wait(20) == 5


def test_a_job_that_never_gets_to_a_checkpoint_is_requeued_ten_times_at_most(tmp_path):
    folder, env = job_that_ends_with_5(tmp_path)

    def start(**more: str) -> tuple[int, str]:
        done = subprocess.run(["bash"], input=rendered(folder, None), env=env | more, capture_output=True, text=True)
        return done.returncode, done.stdout

    for step in (10, 20):  # of a checkpoint in `save_dir`
        assert [start()[0] for _ in range(9)] == [5] * 9
        RunFolder(folder).write_status({**STATUS, "checkpoint": {"path": "/scratch/run-state", "step": step}})
    ends = [start() for _ in range(10)]
    assert [code for code, _ in ends] == [5] * 9 + [4] and "submit it again with more time" in ends[-1][1]
    assert start(SLURM_JOB_ID="8")[0] == 5


def test_a_value_that_the_script_cannot_hold_is_refused(tmp_path):
    with pytest.raises(LaunchError, match="--account: .* line break"):
        rendered(tmp_path / "run", None, "--account", "me\n#SBATCH --uid=0")
    with pytest.raises(LaunchError, match="the path has %"):
        rendered(tmp_path / "100%" / "run", None)


def test_without_slurm_the_script_is_written_and_a_submission_says_what_to_do(tmp_path, monkeypatch):
    folder = toy_run(tmp_path / "toy", **SHORT)
    written = launch(folder, path="/nowhere")
    assert written["job"] is None and written["gpus"] == 1
    assert "#SBATCH --gpus-per-node=1" in (folder / "train.sbatch").read_text()
    assert "no sbatch on this machine; " in launch(folder, "--submit", code=1, path="/nowhere")


@pytest.mark.parametrize(
    ("name", "said"),
    [("squeue", "Unable to contact slurm controller"), ("sbatch", "Invalid generic resource (gres) specification")],
)
def test_a_refused_submission_has_slurms_own_words(name, said, tmp_path):
    folder = toy_run(tmp_path / "toy", **SHORT)
    for program in ("squeue", "sbatch"):
        executable(tmp_path / program, f"#!/bin/sh\necho '{said}' >&2\nexit {int(program == name)}\n")
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert f"{name} failed: {said}" in launch(folder, "--submit", code=1, path=path)


@pytest.mark.parametrize(("state", "job"), [("RUNNING", "7"), ("COMPLETING", "8")])
def test_a_job_after_which_slurm_only_cleans_up_is_no_job_of_the_run(state, job, tmp_path):
    folder = toy_run(tmp_path / "toy", **SHORT)
    answer = f"s|^.*format=||; s|%i|7|; s|%T|{state}|; s|%o|{folder}/train.sbatch |"
    executable(tmp_path / "squeue", f"#!/bin/sh\necho 6 {state}\necho \"$*\" | sed '{answer}'\n")
    executable(tmp_path / "sbatch", "#!/bin/sh\necho 8\n")
    assert launch(folder, "--submit", path=f"{tmp_path}:{os.environ['PATH']}")["job"] == job


def test_a_submission_names_what_is_missing(data, tmp_path, monkeypatch):
    for name in ("sbatch", "squeue"):
        executable(tmp_path / name, "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    made = runs.create(spec(name="cat"), pictures(data / "photos"))
    for image in (data / "datasets" / "cat").glob("*.png"):
        image.unlink()
    with pytest.raises(LaunchError, match="cat cannot be started: .*add at least one image"):
        slurm.submit(made, runs.load(made))
