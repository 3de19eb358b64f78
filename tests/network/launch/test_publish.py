"""A LoRA is published: what is sent, that it goes on after it was interrupted, and that no token or path gets out."""

import json
import resource
import subprocess
import sys

import numpy as np
import pytest
from hub_repo_server import TOKEN, Repository, serving_hub
from huggingface_hub import ModelCard
from monitor_helpers import wait_for
from PIL import Image
from runs_helpers import PROJECT, python
from safetensors import safe_open
from safetensors.numpy import save_file

import runs
from launch import publish
from launch.common import LaunchError
from runs import manage, model_card

NOTHING = dict.fromkeys(("lora", "title", "description", "licence"), "") | {"base_model": None, "samples": 6}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serving_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield running


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A completed run with two LoRAs, samples and a data set."""
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "data"))
    images = tmp_path / "images"
    images.mkdir()
    for number in range(2):
        Image.new("RGB", (64, 64), (number * 90, 10, 10)).save(images / f"{number}.png")
        (images / f"{number}.txt").write_text(f"mycat, photo, place {number}", encoding="utf-8")
    runs.create(runs.RunSpec(name="My <cat>", trigger="mycat", model="flux-dev", backend="diffusers"), images)
    made = runs.run_folder("My-cat")
    weights = {"transformer.a.lora_A.weight": np.ones((4, 8), np.float32)}
    for name, step in (("My-cat", 40), ("My-cat-step000020", 20)):
        metadata = {"ss_steps": str(step), "ss_sd_model_name": "/home/somebody/models/flux1-dev.safetensors"}
        save_file(weights, made / f"{name}.safetensors", metadata)
    (made / "sample_prompts.txt").write_text("a photo of mycat --w 64 --d 1\na <b>drawing</b>\n", encoding="utf-8")
    (made / "sample").mkdir()
    for step in (20, 40):
        for prompt in (0, 1):
            name = f"My-cat_{step:06d}_{prompt:02d}_20261122120000_1.png"
            Image.new("RGB", (8, 8), (step, prompt, 0)).save(made / "sample" / name)
    return made


def _publish(folder, repo="me/cat", public=False, replace_card=False, **options):
    return publish.publish(folder, repo, public, replace_card, {**NOTHING, **options})


def test_the_lora_its_card_and_its_samples_are_published_privately_in_one_commit(hub, folder, tmp_path, capsys):
    """The hub can read the card, which shows markup as text."""
    result = _publish(folder, description="My **own** words.")
    repo = hub.repositories["me/cat"]
    assert repo.private and len(repo.commits) == 1
    assert set(repo.files) == {"README.md", "My-cat.safetensors", "images/sample-01.png", "images/sample-02.png"}
    assert result["url"].endswith("/me/cat") and publish.published(folder) == result
    assert not (folder / ".publish").exists() and "\nSending 4 files" in capsys.readouterr().out
    assert repo.files["images/sample-01.png"] == next((folder / "sample").glob("*000040_00_*")).read_bytes()
    text = repo.files["README.md"].decode()
    data = ModelCard(text).data
    assert data.base_model == "black-forest-labs/FLUX.1-dev" and data.license == "other"
    assert data.license_name == "flux-1-dev-non-commercial-license" and data.instance_prompt == "mycat"
    assert [one["text"] for one in data.widget] == ["a photo of mycat", "a <b>drawing</b>"]
    assert "template:diffusion-lora" in data.tags
    assert "# My &lt;cat\\>" in text and "My **own** words." in text and 'load_lora_weights("me/cat"' in text
    assert str(folder.parent) not in text
    path = tmp_path / "published.safetensors"
    path.write_bytes(repo.files["My-cat.safetensors"])
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
        assert (file.get_tensor("transformer.a.lora_A.weight") == 1).all()
    assert metadata["ss_sd_model_name"] == "flux1-dev.safetensors", "no path of this machine"
    assert metadata["ss_steps"] == "40" and metadata["modelspec.trigger_phrase"] == "mycat"
    assert json.loads(metadata["ss_tag_frequency"]) == {"My-cat": {"mycat": 2, "photo": 2, "place 0": 1, "place 1": 1}}
    _publish(folder, repo="", lora="My-cat-step000020.safetensors", licence="apache-2_0", samples=1, public=True)
    repo = hub.repositories["me/My-cat"]
    assert not repo.private and b"license: apache-2.0" in repo.files["README.md"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": "other.safetensors"}, "choose one of: My-cat.safetensors, My-cat-step000020.safetensors"),
        ({"lora": "../My-cat/My-cat.safetensors"}, "has no LoRA"),
        ({"licence": "nonsense"}, "Licence: nonsense is not known; choose one of .*--licence KEY"),
        ({"samples": 99}, "from 0 to 24"),
    ],
)
def test_a_wrong_choice_is_refused_before_anything_is_created(hub, folder, options, message):
    with pytest.raises(LaunchError, match=message):
        _publish(folder, **options)
    assert not hub.repositories


def test_a_full_disk_is_named_and_keeps_no_part_of_the_lora(folder):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(runs.RunError, match="cannot prepare .*My-cat.safetensors: the file is larger than"):
            publish.prepare(folder, NOTHING | {"licence": "mit"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*(folder / publish.FOLDER).iterdir()] == []


def test_a_card_that_somebody_else_wrote_and_a_public_repository_are_left_alone(hub, folder, monkeypatch):
    hub.repositories["me/cat"] = Repository(private=True, files={"README.md": b"mine"})
    with pytest.raises(LaunchError, match="has a card that Hangproof did not write"):
        _publish(folder)
    assert hub.repositories["me/cat"].files == {"README.md": b"mine"}
    hub.repositories["me/cat"].private = False
    with pytest.raises(LaunchError, match="exists and is public"):
        _publish(folder)
    hub.repositories["me/cat"].private = True
    _publish(folder, replace_card=True)
    assert b"hangproof" in hub.repositories["me/cat"].files["README.md"]
    _publish(folder)  # ours is replaced without a question
    assert len(hub.repositories["me/cat"].commits) == 2
    manage.rename(folder, "Second light!")
    assert publish.choices(folder)["repo"] == "Second-light" and "# Second light" in publish.preview(folder, NOTHING)
    monkeypatch.setattr(model_card, "licence_of", lambda model: "")  # a base model of one's own
    with pytest.raises(LaunchError, match="Licence: that of the base model is not known"):
        publish.preview(folder, NOTHING)


def test_an_upload_that_fails_is_tried_again_and_a_refusal_says_what_to_do(hub, folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    with monkeypatch.context() as impatient, pytest.raises(LaunchError, match="cannot be reached or does not answer"):
        impatient.setattr(publish, "REQUEST_S", 0.5)
        hub.stall_put.set()
        _publish(folder)
    assert publish.published(folder) is None
    hub.stall_put.clear()
    hub.answers = [503]
    _publish(folder)
    assert hub.repositories["me/cat"].files["My-cat.safetensors"]
    (folder / "My-cat.safetensors").unlink()  # so that another file is sent
    hub.answers = [413]
    with pytest.raises(LaunchError, match="HTTP status 413. Hugging Face says: broken"):
        _publish(folder)
    monkeypatch.setenv("HF_TOKEN", "hf_read_only")
    with pytest.raises(LaunchError, match="the token may not write there"):
        _publish(folder, repo="me/other")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(LaunchError, match="not logged in") as caught:
        _publish(folder)
    assert "hf_" not in str(caught.value)


@pytest.mark.slow
def test_a_publication_that_was_killed_continues_without_sending_a_file_twice(hub, folder):
    words = ("-m", "launch", "publish", "My-cat", "--repo", "me/cat", "--json")
    hub.stall_put.set()
    process = subprocess.Popen([sys.executable, *words], cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: process.poll() is not None or any(method == "PUT" for method, _ in hub.requests))
    assert process.poll() is None
    process.kill()
    process.communicate()
    hub.stall_put.clear()
    wait_for(lambda: hub.puts, what="the server had received the first file")
    again = python(*words)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout.splitlines()[-1])["repo"] == "me/cat"
    assert len(hub.puts) == len(set(hub.puts)) and len(hub.repositories["me/cat"].commits) == 1
    assert TOKEN not in again.stdout + again.stderr
    assert not any(TOKEN in path for _, path in hub.requests)
    assert not [path for path in folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
