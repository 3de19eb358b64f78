"""The check points of a starting rank in its heartbeat, what it says about its environment, and who goes first."""

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from guards import heartbeat, startup, turns
from guards.heartbeat import Heartbeat, path_of, read

ROOT = Path(__file__).resolve().parents[3]
HUNDRED_S = 100


def test_a_reader_sees_when_each_check_point_was_reached_and_which_one_was_last(tmp_path):
    began_s = time.monotonic()
    writer = Heartbeat(path_of(tmp_path, 0))
    assert read(path_of(tmp_path, 0)).point == ""
    for name in ("arguments", "folders", "data"):
        writer.reach(name)
        time.sleep(0.02)
    writer.reach("data")  # it is there already
    beat = read(path_of(tmp_path, 0))
    reached = dict(zip(startup.NAMES, beat.reached, strict=True))
    assert beat.point == "data"
    assert began_s <= reached["arguments"] < reached["folders"] < reached["data"] == beat.point_s
    assert {name for name, at_s in reached.items() if not at_s} == set(startup.NAMES) - {"arguments", "folders", "data"}
    spent = dict(zip(startup.NAMES, beat.spent, strict=True))
    assert spent["arguments"] >= 0.02 and spent["data"] == 0.0, spent


def test_a_check_point_that_begins_again_keeps_its_first_time_and_adds_up_what_it_took(tmp_path):
    writer = Heartbeat(path_of(tmp_path, 0))
    for name in ("data", "model", "data", "network"):
        writer.reach(name)
        time.sleep(0.02)
    beat = read(path_of(tmp_path, 0))
    data, model = startup.number("data") - 1, startup.number("model") - 1
    assert beat.reached[data] < beat.reached[model] < beat.point_s
    assert beat.spent[data] >= 0.04 and beat.spent[model] >= 0.02


def test_the_first_step_has_passed_what_the_run_does_not_use(tmp_path):
    writer = Heartbeat(path_of(tmp_path, 0))
    writer.reach("arguments")
    writer.reach("ready")
    assert not read(path_of(tmp_path, 0)).reached[startup.number("tracker") - 1]
    writer.reach("first_step")
    beat = read(path_of(tmp_path, 0))
    assert all(beat.reached[:-1]) and not beat.reached[-1]
    assert beat.reached[startup.number("tracker") - 1] == beat.point_s


def test_an_unknown_check_point_is_ignored(tmp_path):
    writer = Heartbeat(path_of(tmp_path, 0))
    writer.reach("lunch")
    writer.reach("")
    assert read(path_of(tmp_path, 0)).point == ""


def test_every_check_point_is_reached_in_every_trainer_by_a_name_that_exists():
    def reached(*files):
        names = set()
        for file in files:
            text = (ROOT / file).read_text(encoding="utf-8")
            names |= {n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant)} & set(startup.NAMES)
            for call in ast.walk(ast.parse(text)):
                if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "reach":
                    assert not isinstance(call.args[0], ast.Constant) or call.args[0].value in startup.NAMES, file
        return names

    shared = ("sd_scripts_patches/heartbeat.py", "sd_scripts_patches/session.py")
    assert reached("trainer/__main__.py", "trainer/setup.py", "trainer/loop.py") == set(startup.NAMES)
    assert reached(*shared) == set(startup.NAMES)
    assert reached(*shared, "sd_scripts_patches/musubi/heartbeat.py") == set(startup.NAMES)


def test_the_environment_is_shown_without_secrets(tmp_path, monkeypatch):
    for name in list(os.environ):
        if startup.SHOWN.fullmatch(name):
            monkeypatch.delenv(name)
    secret = "0123456789abcdef0123456789abcdef01234567"
    values = {
        "RANK": "2",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "",
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": secret,
        "WANDB_NOTES": f"my key is {secret}",
        "WANDB_BASE_URL": "https://me:pass@wandb.example",
        "WANDB_IDENTITY_TOKEN_FILE": "/tmp/x",
        "HOME": "/root",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    writer = Heartbeat(path_of(tmp_path, 2), rank=2, world=4)
    writer.describe("cpu", "gloo")
    beat = read(path_of(tmp_path, 2))
    about = startup.read_about(beat.about)
    assert (beat.local_rank, about["device"], about["backend"]) == (1, "cpu", "gloo")
    hidden = dict.fromkeys(
        ("WANDB_API_KEY", "WANDB_NOTES", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"), startup.HIDDEN
    )
    assert about["environment"] == {k: v for k, v in values.items() if k != "HOME"} | hidden
    raw = path_of(tmp_path, 2).read_bytes()
    assert secret.encode() not in raw and b"me:pass" not in raw


def test_a_large_environment_fits(tmp_path, monkeypatch):
    for i in range(300):
        monkeypatch.setenv(f"NCCL_X{i}", "ü" * 500)
    Heartbeat(path_of(tmp_path, 0)).step(1)
    beat = read(path_of(tmp_path, 0))
    assert beat.step == 1 and startup.read_about(beat.about)["host"] == os.uname().nodename
    assert len(startup.read_about(beat.about)["environment"]) >= 5


def test_what_cannot_be_read_about_a_process_is_nothing():
    assert startup.read_about("") == startup.read_about("{") == startup.read_about("3") == {}


SECOND = """
import sys, time
from guards import turns
from guards.heartbeat import Heartbeat
beat = Heartbeat.from_env()
print("waits", flush=True)
turns.reach_in_turn(beat, "tokenizer")
print("has passed", beat.point, flush=True)
"""


@pytest.fixture
def second(tmp_path):
    """Rank 1 of a machine, as a process of its own that wants the tokenizers."""

    def start(**extra):
        env = {**os.environ, "HANGPROOF_HEARTBEAT": str(tmp_path), "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
        process = subprocess.Popen(
            [sys.executable, "-c", SECOND], env=env | extra, cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "waits\n"
        return process

    started: list[subprocess.Popen] = []
    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def waits_with(folder, note, process):
    until = time.monotonic() + HUNDRED_S
    while time.monotonic() < until and process.poll() is None:
        beats = [b for b in heartbeat.read_all(folder) if b.rank == 1]
        if beats and note in beats[0].note:
            return True
        time.sleep(0.02)
    return False


def test_tokenizers_are_fetched_by_the_first_rank_of_a_machine(tmp_path, second):
    old = Heartbeat(path_of(tmp_path, 0))  # the caching command of before: it passed the tokenizers and ended
    old.reach("tokenizer")
    old.reach("data")
    old.end("done")
    process = second()
    assert waits_with(tmp_path, f"{turns.WAITS} 0 at check point 3", process)
    first = Heartbeat(path_of(tmp_path, 0), world=2)
    first.reach("tokenizer")
    time.sleep(0.3)
    assert process.poll() is None
    first.reach("data")
    assert process.stdout.readline() == "has passed tokenizer\n"
    assert process.wait(HUNDRED_S) == 0


def test_the_wait_for_the_first_rank_ends(tmp_path, second):
    process = second(HANGPROOF_BARRIER_TIMEOUT_S="0.5")
    assert process.wait(HUNDRED_S) == 75


def test_the_first_rank_of_a_second_machine_does_not_wait(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    beat = Heartbeat(path_of(tmp_path, 4), rank=4, world=8)
    turns.reach_in_turn(beat, "tokenizer")
    assert beat.point == "tokenizer"
    turns.reach_in_turn(Heartbeat(None, rank=5), "tokenizer")  # without a folder there is nothing to wait for
