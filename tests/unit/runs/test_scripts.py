"""The script of a run with several processes: what it passes to accelerate, and what it needs from its environment."""

import subprocess

import pytest
from runs_helpers import arguments_of, pictures, run_script, spec, stub

import runs
from runs.quoting import Variable, quote
from runs.scripts import script

NODE = {"HANGPROOF_NODE": "1", "HANGPROOF_MAIN_ADDRESS": "10.0.0.7", "HANGPROOF_MAIN_PORT": "29400"}


def after(words: list[bytes], flag: str) -> str:
    """The value of a flag among the launcher's arguments."""
    return words[words.index(flag.encode()) + 1].decode()


@pytest.mark.parametrize("backend", ["diffusers", "sd-scripts"])
def test_one_machine_gets_a_free_port_and_the_size_of_its_world(data, tmp_path, backend):
    folder = runs.create(spec(gpus=4, backend=backend), pictures(tmp_path / "images"))
    words = arguments_of(run_script(folder / "train.sh", stub(tmp_path)))
    assert b"--multi_gpu" in words and b"--machine_rank" not in words
    assert [after(words, f) for f in ("--num_processes", "--num_machines", "--main_process_port")] == ["4", "1", "0"]
    assert after(words, "--ddp_timeout") == "60"
    text = (folder / "train.sh").read_text()
    assert "\nexport HANGPROOF_WORLD=4\nexport PET_STANDALONE=1\nexport PET_LOCAL_ADDR=127.0.0.1\n" in text
    assert "# 4 processes train together: " in text
    alone = script(spec(), tmp_path, platform="linux")
    assert "HANGPROOF_WORLD" not in alone and "--multi_gpu" not in alone and "together" not in alone


@pytest.mark.parametrize("gpus", [1, 2])
def test_several_machines_take_their_number_and_the_first_ones_address_from_the_environment(data, tmp_path, gpus):
    folder = runs.create(spec(nodes=3, gpus=gpus), pictures(tmp_path / "images"))
    hostile = "10.0.0.7 $(touch x); `id` \"'\n--multi"
    words = arguments_of(run_script(folder / "train.sh", stub(tmp_path), **{**NODE, "HANGPROOF_MAIN_ADDRESS": hostile}))
    assert [after(words, f) for f in ("--num_processes", "--num_machines")] == [str(3 * gpus), "3"]
    place = [after(words, f) for f in ("--machine_rank", "--main_process_ip", "--main_process_port")]
    assert place == ["1", hostile, "29400"], "the value of a variable is one word"
    text = (folder / "train.sh").read_text()
    assert f"\nexport HANGPROOF_WORLD={3 * gpus}\n" in text and "PET_STANDALONE" not in text
    for missing in NODE:
        result = run_script(folder / "train.sh", stub(tmp_path), **{**NODE, missing: ""})
        assert result.returncode == 2 and not result.stdout, "before anything starts"
        assert f"{missing} is not set: this run trains on 3 machines" in result.stderr.decode()


def test_several_machines_are_refused_under_windows_and_musubis_caches_are_made_by_one_process(tmp_path):
    with pytest.raises(runs.RunError, match="under Linux only; set nodes to 1"):
        script(spec(nodes=2), tmp_path, platform="win32")
    assert "--multi_gpu" in script(spec(gpus=2), tmp_path, platform="win32")
    assert quote(Variable("HANGPROOF_NODE")) == '"$HANGPROOF_NODE"'
    with pytest.raises(runs.RunError, match="not the name of an environment variable"):
        quote(Variable('A"; rm -rf x #'))
    text = script(spec(model="z-image", backend="musubi", gpus=4), tmp_path, platform="linux")
    caching, training = text.split("# Trains.")
    assert caching.count('\n"$python" -m sd_scripts_patches') == 2 and "--num_processes" not in caching
    assert "--num_processes 4" in training
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=60)
