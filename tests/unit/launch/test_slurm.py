"""`python -m launch slurm` without Slurm: the script as text, the choice of GPUs, what is said where something is missing."""

import argparse
import json
import os
import re
import shlex
import subprocess

import pytest
from monitor_helpers import toy_run
from runs_helpers import call, executable, pictures, spec

import runs
from launch import slurm, slurm_nodes
from launch.common import LaunchError

SHORT = dict(steps=60, pace=0.05, every=20)


def slurm_arguments(folder, *words):
    """The parsed arguments of the command."""
    parser = argparse.ArgumentParser()
    slurm.add_arguments(parser)
    return parser.parse_args([str(folder), *words])


def launch(folder, *words, code=0, path):
    """The command with this PATH: its line of JSON, or its standard error where it has to fail."""
    done = call("launch", "slurm", folder, "--json", *words, PATH=path)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else json.loads(done.stdout.splitlines()[-1])


def request(**more):
    return slurm.Request(**more)


def options(text):
    """The #SBATCH lines as bash reads their words: {option: value}."""
    words = [word for line in re.findall(r"^#SBATCH (.*)$", text, re.M) for word in shlex.split(line)]
    return dict(word.removeprefix("--").partition("=")[::2] for word in words)


def test_the_script_asks_for_what_the_run_needs(data, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no Slurm
    made = runs.create(spec(gpus=2, nodes=3, workers=2, name="Me & my cat"), pictures(data / "photos"))
    args = slurm_arguments(made, "--partition", "a b", "--time", "1-12", "--account", "me", "--mem", "64G")
    folder, found = slurm.find(str(made))
    text = slurm.render(folder, found, slurm.request(found, args))
    assert options(text) == {
        "job-name": "hangproof-Me-my-cat",
        "output": f"{made}/slurm-%j.log",
        "open-mode": "append",
        "nodes": "3",
        "ntasks-per-node": "1",
        "cpus-per-task": "6",
        "gpus-per-node": "2",
        "mem": "64G",
        "partition": "a b",
        "account": "me",
        "time": "1-12",
        "signal": "B:TERM@120",
        "dependency": "singleton",
        "requeue": "",
    }
    assert "# Trains Me & my cat under Slurm" in text
    assert f"export HANGPROOF_DATA={data}" in text
    assert "export HANGPROOF_NEEDS_GPU=1" in text, "a node with a broken GPU does not train on its CPU"


def test_a_model_that_trains_on_the_cpu_asks_for_no_gpu(data, tmp_path, monkeypatch, capsys):
    executable(tmp_path / "sinfo", "#!/bin/sh\nprintf 'main*|n1|4|(null)\\nbig|g1|64|gpu:a100:4\\n'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    made = runs.create(spec(model="tiny-flux", workers=9), pictures(data / "photos"))
    folder, found = slurm.find(str(made))
    wanted = slurm.request(found, slurm_arguments(made))
    assert (wanted.gpus, wanted.cpus) == (0, 4), "no more processor cores than a node has"
    assert "NEEDS_GPU" not in slurm.render(folder, found, wanted)
    large = runs.create(spec(name="large"), pictures(data / "more"))
    folder, found = slurm.find(str(large))
    with pytest.raises(LaunchError, match="the default partition has no GPU; choose one with --partition: big"):
        slurm.request(found, slurm_arguments(large))
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho 'main*|n1|4|(null)'\n")
    wanted = slurm.request(found, slurm_arguments(large))
    assert wanted.gpus == 0 and "this cluster names no GPU" in capsys.readouterr().err
    assert "export HANGPROOF_NEEDS_GPU=1" in slurm.render(folder, found, wanted)


@pytest.mark.parametrize("nodes", [1, 2])
def test_bash_accepts_the_script(nodes, tmp_path):
    folder = tmp_path / 'it\'s a "run" for $5 #1; ünï'
    text = slurm.render(folder, None, request(nodes=nodes))
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert options(text)["output"] == f"{folder}/slurm-%j.log"
    assert ("export HANGPROOF_NODE=" in text) == ("HANGPROOF_MAIN_PORT" in text) == ("$starts" in text) == (nodes == 2)


def test_a_value_that_the_script_cannot_hold_is_refused(tmp_path):
    with pytest.raises(LaunchError, match="--account: .* line break"):
        slurm.render(tmp_path / "run", None, request(account="me\n#SBATCH --uid=0"))
    with pytest.raises(LaunchError, match="the path has %"):
        slurm.render(tmp_path / "100%" / "run", None, request())


@pytest.mark.parametrize("limit", ["soon", "1:2", "-5", "1-", "8:00:00:00", ""])
def test_a_time_limit_has_the_form_of_sbatch(limit, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    folder = toy_run(tmp_path / "toy", **SHORT)
    if not limit:
        assert slurm.request(None, slurm_arguments(folder, "--time", limit)).time == ""
        return
    with pytest.raises(LaunchError, match=f"--time {limit}: write minutes"):
        slurm.request(None, slurm_arguments(folder, f"--time={limit}"))


def node(name="n", cpus=8, **gpus):
    return slurm_nodes.Node(name, cpus, gpus)


CHOICES = {  # the cluster, GPUs on a node: what is asked for, or a part of the error
    "no GPU": ([node()], 1, None),
    "one type": ([node(a100=4), node(a100=8)], 2, ""),
    "types without names": ([node(**{"": 2})], 2, ""),
    "several types": ([node(t4=4), node(a100=4)], 1, LaunchError("name one with --gpus-type: a100, t4")),
    "too few on each node": ([node(a100=2), node(a100=1)], 4, LaunchError("largest node has 2")),
}


@pytest.mark.parametrize("what", CHOICES)
def test_the_choice_of_gpus(what):
    nodes, each, expected = CHOICES[what]
    if isinstance(expected, LaunchError):
        with pytest.raises(LaunchError, match=str(expected)):
            slurm_nodes.choose(nodes, each)
    else:
        assert slurm_nodes.choose(nodes, each) == expected


RESOURCES = {
    "(null)": {},
    "gpu:2": {"": 2},
    "gpu": {"": 1},
    "gpu:a100:4(S:0-1),shard:8": {"a100": 4},
    "gpu:nvidia_a100_80gb_pcie:2(S:0,3),gpu:t4:1,mps:400": {"nvidia_a100_80gb_pcie": 2, "t4": 1},
}


@pytest.mark.parametrize("text", RESOURCES)
def test_the_gpus_of_a_node_are_read_from(text):
    assert slurm_nodes.gpus_of(text) == RESOURCES[text]


def test_without_slurm_the_script_is_written_and_a_submission_says_what_to_do(tmp_path, monkeypatch):
    folder = toy_run(tmp_path / "toy", **SHORT)
    written = launch(folder, path="/nowhere")
    assert written["job"] is None and written["gpus"] == 1
    assert "#SBATCH --gpus-per-node=1" in (folder / "train.sbatch").read_text()
    assert "no sbatch on this machine; " in launch(folder, "--submit", code=1, path="/nowhere")


def test_a_slurm_that_does_not_answer_only_prevents_the_submission(tmp_path):
    folder = toy_run(tmp_path / "toy", **SHORT)
    executable(tmp_path / "sinfo", "#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert launch(folder, path=path)["gpus"] == 1
    assert "sinfo failed: Unable to contact slurm controller" in launch(folder, "--submit", code=1, path=path)


def test_a_submission_names_what_is_missing(data, tmp_path, monkeypatch):
    """Stand-ins answer for Slurm, so that this is tested on any machine."""
    for name in ("sinfo", "sbatch", "squeue"):
        executable(tmp_path / name, "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    made = runs.create(spec(name="cat"), pictures(data / "photos"))
    for image in (data / "datasets" / "cat").glob("*.png"):
        image.unlink()
    with pytest.raises(LaunchError, match="cat cannot be started: .*add at least one image"):
        slurm.submit(made, runs.load(made))
