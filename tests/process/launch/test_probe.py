"""The probe and the ladder: real processes of the tiny model, one of which hangs; a broken image; and what the rungs say."""

import os
import subprocess
import sys

import pytest
from short_run_helpers import hang_at, launched, nothing_runs, settled, tiny_run

from launch import probe, short_run
from launch.common import LaunchError
from launch.probe import Climb, Rung, judge_group, judge_images
from launch.short_run import FAILS, HANGS, SLOW, TRAINS, Result
from runs.paths import ROOT

LIMIT_S = 500


def rung(outcome=TRAINS, processes=1, workers=0, images=4, text="It says so.", **measured) -> Rung:
    rungs = [*probe.group_rungs(1), *probe.group_rungs(2), *probe.image_rungs(1000)]
    name = next(r.name for r in rungs if (r.images, r.processes, r.workers) == (images, processes, workers))
    measured = {"step_s": 1.0, "host_bytes": 4 * 10**9, "report": {"verdict": {"advice": "Do this."}}, **measured}
    return Rung(name, images, processes, workers, outcome, text, **measured)


@pytest.mark.parametrize(
    ("images", "sizes"), [(1, [1]), (2, [2]), (100, [2, 100]), (101, [2, 100, 101]), (10_000, [2, 100, 10_000])]
)
def test_the_rungs_of_a_ladder_are_2_100_and_all_and_those_of_a_probe_one_process_and_all(images, sizes):
    assert [one.images for one in probe.image_rungs(images)] == sizes
    assert [(one.processes, one.workers) for one in probe.group_rungs(4)] == [(1, 0), (4, 0), (4, 1)]
    assert [(one.processes, one.workers) for one in probe.group_rungs(1)] == [(1, 0), (1, 1)]


def test_the_verdict_names_the_first_rung_that_does_not_train():
    fine = judge_group([rung(), rung(TRAINS, 2), rung(TRAINS, 2, 1)])
    assert (fine.kind, fine.advice) == ("fine", "The run can start.") and "all train" in fine.text
    hangs = judge_group([rung(), rung(HANGS, 2), rung("skipped", 2, 1)])
    assert (hangs.kind, hangs.advice) == ("basic", "Do this.")
    assert hangs.text == "1 process, 0 loader workers: trains. 2 processes, 0 loader workers: stop. It says so."
    assert judge_group([rung(), rung(TRAINS, 2), rung(HANGS, 2, 1)]).advice == "Use 0 data loader workers. Do this."
    fails = judge_group([rung(FAILS), rung("skipped", 2)])
    assert fails.text == "1 process, 0 loader workers: failed. It says so." and "probe again" in fails.advice
    late = judge_group([rung(SLOW), rung(TRAINS, 2)])
    assert late.kind == "slow" and "--limit" in late.advice


@pytest.mark.parametrize(
    ("rungs", "image", "kind", "text"),
    [
        ([{}, {}, {}], "", "fine", "Nothing is wrong: 2 images, 100 images, all 1,000 images train."),
        ([{}, {}, {"host_bytes": 20 * 10**9}], "", "scale", "4.0 GB with 2 images, 20.0 GB with all 1,000 images"),
        ([{}, {}, {"step_s": 3.0}], "", "scale", "A step takes longer with more images: 1 s"),
        ([{"image_s": 0.5}, {}, {"image_s": 4.0}], "", "scale", "Encoding an image takes longer"),
        ([{}, {"outcome": SLOW}, {}], "", "slow", "100 images: It says so."),
        ([{"outcome": SLOW}], "", "slow", "nothing trained either"),
        ([{"outcome": FAILS}, {"outcome": "skipped"}], "", "basic", "Already 2 images fail, so it is not the data set"),
        ([{}, {"outcome": HANGS}], "", "scale", "2 images train, 100 images do not, and no single image is to blame."),
        ([{}, {"outcome": FAILS}], "a.png", "image", "stops the training: a.png. It says so."),
    ],
)  # fmt: skip
def test_what_the_ladder_says(rungs, image, kind, text):
    found = judge_images([rung(images=n, **one) for n, one in zip((2, 100, 1000), rungs, strict=False)], image)
    assert found.kind == kind and text in found.text and found.image == image, found
    assert found.advice and ("--limit" in found.advice) == (kind == "slow")


@pytest.mark.parametrize(
    ("log", "blamed"),
    [
        ("", ""),
        ("zipfile.BadZipFile: 3_0064x0064.npz, then 3.npz", "3.png"),
        ("reading 2.png\nreading /data/3.png", ""),
        ("reading photo2.png and 2.pngs", ""),
        ("reading 2.png", "2.png"),
    ],
)
def test_the_image_is_blamed_that_alone_is_named(data, log, blamed):
    climb = Climb(tiny_run(data, images=1), 1, 60, print)
    climb.images = [climb.source / f"{number}.png" for number in range(4)]
    climb.failure = Result(FAILS, "It failed.", log=log)
    assert climb.blamed([rung(FAILS), rung("skipped")]) == blamed


@pytest.mark.slow
def test_a_process_that_hangs_is_found_with_its_check_point_and_nothing_is_left(data, one_cpu, monkeypatch):
    hang_at(monkeypatch, "check point network")
    monkeypatch.setattr(short_run, "QUIET_S", 2.0)
    lines: list[str] = []
    answer = probe.probe(None, 1, progress=lines.append)
    first, second = answer["stages"]
    assert not answer["ok"] and "stopped at check point 5 (LoRA network)" in answer["verdict"], answer["verdict"]
    assert "memory" in answer["advice"]
    said = first["report"]["verdict"]
    assert (first["outcome"], said["point"], said["rank"]) == (HANGS, "network", 0)
    assert "step_sleeps (injector.py" in said["text"] and any("step_sleeps (" in line for line in first["lines"])
    assert second["outcome"] == probe.SKIPPED and "Not tried" in second["text"]
    assert lines[0] == "1 of 2: 1 process, 0 loader workers …" and lines[1].startswith(f"{lines[0][:-2]}: hangs, ")
    assert os.environ["HANGPROOF_DATA"] == str(data)
    assert nothing_runs(data) and not (data / short_run.SCRATCH).exists()


def test_a_run_without_images_or_without_its_model_cannot_be_probed(data):
    folder = tiny_run(data, model="flux-dev")
    with pytest.raises(LaunchError, match=r"cannot be started: .*"):
        probe.probe(folder, 1)
    for image in (data / "datasets" / folder.name).glob("*.png"):
        image.unlink()
    with pytest.raises(LaunchError, match="has no images"):
        probe.ladder(folder)
    assert not (data / short_run.SCRATCH).exists()


@pytest.mark.slow
def test_wrong_usage_and_unknown_runs_are_refused(data):
    def launch(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "launch", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)

    assert launch("probe", "--gpus", "-1").returncode == 1
    assert launch("probe", "--steps", "6").returncode == 2
    assert launch("ladder").returncode == 2
    unknown = launch("ladder", "no-such-run")
    assert unknown.returncode == 1 and "no run 'no-such-run'" in unknown.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="SIGTERM is Linux's and macOS's")
def test_a_probe_that_is_cancelled_leaves_nothing(data, monkeypatch, tmp_path):
    hang_at(monkeypatch, "check point arguments", FAULT_MARK=str(tmp_path / "mark"))
    command = [sys.executable, "-m", "launch", "probe", "--gpus", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    settled((tmp_path / "mark").exists, "the hang")
    process.terminate()
    assert process.wait(LIMIT_S) != 0
    assert nothing_runs(data) and not (data / short_run.SCRATCH).exists()


@pytest.mark.slow
def test_a_broken_image_is_named(data, one_cpu):
    folder = tiny_run(data, images=5)
    broken = sorted((data / "datasets" / folder.name).glob("*.png"))[3]
    broken.write_bytes(broken.read_bytes()[:80])
    code, found, said = launched("ladder", folder)
    assert code == 1 and (found["kind"], found["image"]) == ("image", broken.name), said
    assert found["stages"][0]["outcome"] == TRAINS and "export it again" in found["advice"]
