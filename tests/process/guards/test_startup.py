"""The check points of a starting rank in its heartbeat, what it says about its environment."""

import ast
import os
import time

import children

from guards import startup
from guards.heartbeat import Heartbeat, path_of, read


def test_a_reader_sees_when_each_check_point_was_reached_and_how_long_it_took(tmp_path):
    """One that begins again keeps its first time and adds up what it took; an unknown one is ignored.

    The first step has passed what the run does not use.
    """
    began_s = time.monotonic()
    writer = Heartbeat(path_of(tmp_path, 0))
    assert read(path_of(tmp_path, 0)).point == ""
    for name in ("arguments", "lunch", "data", "model", "data", "network"):
        writer.reach(name)
        time.sleep(0.02)
    beat = read(path_of(tmp_path, 0))
    reached, spent = (dict(zip(startup.NAMES, row, strict=True)) for row in (beat.reached, beat.spent))
    assert beat.point == "network"
    assert began_s <= reached["arguments"] < reached["data"] < reached["model"] < reached["network"] == beat.point_s
    assert {name for name, at_s in reached.items() if at_s} == {"arguments", "data", "model", "network"}
    assert spent["data"] >= 0.04 and spent["model"] >= 0.02 and spent["network"] == 0.0, spent
    assert not beat.reached[startup.number("tracker") - 1]
    writer.reach("first_step")
    beat = read(path_of(tmp_path, 0))
    assert all(beat.reached[:-1]) and not beat.reached[-1]
    assert beat.reached[startup.number("tracker") - 1] == beat.point_s


def test_every_check_point_is_reached_in_every_trainer_by_a_name_that_exists():
    def reached(*files):
        names = set()
        for file in files:
            text = (children.ROOT / file).read_text(encoding="utf-8")
            names |= {n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant)} & set(startup.NAMES)
            for call in ast.walk(ast.parse(text)):
                if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "reach":
                    assert not isinstance(call.args[0], ast.Constant) or call.args[0].value in startup.NAMES, file
        return names

    shared = ("sd_scripts_patches/heartbeat.py", "sd_scripts_patches/session.py")
    assert reached("trainer/__main__.py", "trainer/setup.py", "trainer/loop.py") == set(startup.NAMES)
    assert reached(*shared) == set(startup.NAMES)
    assert reached(*shared, "sd_scripts_patches/musubi/heartbeat.py") == set(startup.NAMES)


SECRET = "0123456789abcdef0123456789abcdef01234567"
SHOWN = {"RANK": "2", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO"}
SHOWN |= {"NCCL_SOCKET_IFNAME": "", "WANDB_MODE": "offline", "HANGPROOF_NPZ_TIMEOUT_S": "60"}
HIDDEN = {"WANDB_API_KEY": SECRET, "WANDB_NOTES": f"my key is {SECRET}", "WANDB_IDENTITY_TOKEN_FILE": "/tmp/x"}
HIDDEN |= {"WANDB_BASE_URL": "https://me:pass@wandb.example"}


def test_the_environment_is_shown_without_secrets(tmp_path, monkeypatch):
    for name in list(os.environ):
        if startup.SHOWN.fullmatch(name):
            monkeypatch.delenv(name)
    for name, value in {**SHOWN, **HIDDEN, "HOME": "/root"}.items():
        monkeypatch.setenv(name, value)
    Heartbeat(path_of(tmp_path, 2), rank=2, world=4).describe("cpu", "gloo")
    beat = read(path_of(tmp_path, 2))
    about = startup.read_about(beat.about)
    assert (beat.local_rank, about["device"], about["backend"]) == (1, "cpu", "gloo")
    assert about["environment"] == SHOWN | dict.fromkeys(HIDDEN, startup.HIDDEN)
    raw = path_of(tmp_path, 2).read_bytes()
    assert SECRET.encode() not in raw and b"me:pass" not in raw


def test_a_large_environment_fits(tmp_path, monkeypatch):
    for i in range(300):
        monkeypatch.setenv(f"NCCL_X{i}", "ü" * 500)
    Heartbeat(path_of(tmp_path, 0)).step(1)
    beat = read(path_of(tmp_path, 0))
    assert beat.step == 1 and startup.read_about(beat.about)["host"] == os.uname().nodename
    assert len(startup.read_about(beat.about)["environment"]) >= 5
