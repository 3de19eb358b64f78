"""A base model that is missing, incomplete or not available is reported before a run starts, with what to do."""

import contextlib
import shutil

import numpy as np
import pytest
from hub_server import COMMIT, only_hub
from runs_helpers import spec
from safetensors.numpy import save_file

import presets
import runs
from runs import weights
from trainer import models

REPO = "someone/a-flux"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with only_hub(monkeypatch, tmp_path, {}) as server:
        server.refusal = (200, "")
        yield server


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    """A complete model in diffusers' layout."""
    folder = tmp_path_factory.mktemp("model") / "flux"
    for part, (config, *stem) in presets.families()["flux"]["parts"].items():
        (folder / part).mkdir(parents=True)
        (folder / part / config).write_text("{}")
        for name in stem:
            save_file({"w": np.ones((8, 8), np.float32)}, folder / part / f"{name}.safetensors")
    return folder


def of(name: str) -> "runs.RunSpec":
    return spec(extra={"pretrained_model_name_or_path": str(name)})


def test_a_complete_folder_is_fine_and_an_incomplete_one_names_each_file(flux, tmp_path):
    assert weights.problems(of(flux)) == []
    broken = shutil.copytree(flux, tmp_path / "flux")
    (broken / "vae" / "config.json").unlink()
    (broken / "text_encoder" / "model.safetensors").unlink()
    weights_file = broken / "transformer" / "diffusion_pytorch_model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-100])
    (broken / "text_encoder_2" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    (problem,) = weights.problems(of(broken))
    assert str(broken) in problem and "download the complete folder again" in problem
    assert "vae/config.json is missing" in problem and "text_encoder/model.safetensors is missing" in problem
    assert "transformer/diffusion_pytorch_model.safetensors is not a complete safetensors file" in problem
    assert "text_encoder_2/model.safetensors is a git-lfs pointer" in problem


def test_a_path_that_is_no_folder_is_reported_and_the_table_of_a_models_parts_is_the_trainers(tmp_path):
    assert "model folder missing" in weights.problems(of(tmp_path / "nowhere"))[0]
    (tmp_path / "flux.safetensors").write_bytes(b"x")
    (problem,) = weights.problems(of(tmp_path / "flux.safetensors"))
    assert "is a single file" in problem and "kohya's sd-scripts" in problem
    table = presets.families()["flux"]["parts"]
    assert table == {part: [word for word in models.files_of(part) if word] for part in table}
    assert all(models.PART.fullmatch(part) for part in table)


def test_a_file_that_was_checked_is_the_one_that_the_trainer_gets(data, flux, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(flux, tmp_path / "my flux")
    made = of("~/my flux").changed(extra={**of("~/my flux").extra, "network_weights": "~/a.safetensors"})
    assert weights.problems(made) == []
    found = runs.arguments(made, tmp_path / "run")
    assert str(tmp_path / "my flux") in found and str(tmp_path / "a.safetensors") in found, "as a shell has it"
    (data / "models.toml").write_text('[models.mine]\nrepo = "~/my flux"\n')
    mine = spec(model="mine")
    assert weights.problems(mine) == [] and str(tmp_path / "my flux") in runs.arguments(mine, tmp_path / "run")
    save_file({"w": np.ones(1, np.float32)}, tmp_path / "x.safetensors")
    files = {"pretrained_model_name_or_path": "x.safetensors"}  # the script runs in the project folder
    (problem,) = weights.problems(spec(model="sdxl", backend="sd-scripts", extra=files))
    assert f"model files missing: {weights.ROOT / 'x.safetensors'} " in problem
    files["pretrained_model_name_or_path"] = str(flux)  # a folder, which sd-scripts reads too
    assert weights.problems(spec(model="sdxl", backend="sd-scripts", extra=files)) == []


def test_weights_in_several_files_are_all_looked_for(flux, tmp_path):
    broken = shutil.copytree(flux, tmp_path / "flux")
    place = broken / "transformer"
    (place / "diffusion_pytorch_model.safetensors").rename(place / "one.safetensors")
    index = place / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}')
    (problem,) = weights.problems(of(broken))
    assert "transformer/two.safetensors is missing" in problem and "one.safetensors" not in problem


def test_a_model_in_the_cache_needs_no_hub(flux, hub, tmp_path):
    place = tmp_path / "hf" / "hub" / "models--someone--a-flux"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc123")
    shutil.copytree(flux, place / "snapshots" / "abc123")
    assert weights.problems(of(REPO), ask=True) == [] and hub.requests == [] and weights.note(of(REPO)) == ""
    (place / "snapshots" / "abc123" / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    hub.refusal = (404, "")
    assert weights.problems(of(REPO), ask=True) and hub.requests  # half of it is not enough


def test_the_response_of_the_hub_is_reported(hub):
    for status, message in (
        (200, None),
        (403, "accept its licence at"),
        (404, f"model_index.json of {REPO} does not exist at http"),
        (503, "is not available (HTTP status 503); check the network"),
    ):
        hub.refusal = (status, "")
        hub.requests.clear()
        found = weights.problems(of(REPO), ask=True)
        assert len(found) == (message is not None) and (message or "") in "".join(found)
        ((method, path, headers),) = hub.requests
        assert (method, path) == ("HEAD", f"/{REPO}/resolve/main/model_index.json") and "authorization" not in headers
        assert weights.problems(of(REPO)) == []  # unasked, the hub is left alone
        assert len(hub.requests) == 1
        assert "The run downloads it first" in weights.note(of(REPO))


def test_a_hub_that_is_unreachable_or_silent_is_reported_in_time(hub, monkeypatch):
    monkeypatch.setattr(weights, "HUB_TIMEOUT_S", 0.3)
    hub.silent = True
    (problem,) = weights.problems(of(REPO), ask=True)
    assert "is not available (waited 0.3 s for an answer); check the network, or download it elsewhere" in problem
    monkeypatch.setattr(weights, "HUB_TIMEOUT_S", 30)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "is not available" in weights.problems(of(REPO), ask=True)[0]


def test_what_needs_no_hub_to_be_known_is_reported_without_it(hub, monkeypatch):
    (problem,) = weights.problems(spec())
    assert "accept its licence on Hugging Face first: open http" in problem and "HF_TOKEN" in problem
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert weights.problems(spec()) == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (problem,) = weights.problems(spec())
    assert "HF_HUB_OFFLINE prevents the download" in problem and "hf download" in problem
    assert hub.requests == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert weights.problems(spec(), ask=True) == [] and hub.requests[0][2]["authorization"] == "Bearer hf_secret"


def test_a_single_file_that_was_cut_short_is_reported(data, flux, monkeypatch):
    content = (flux / "vae" / "diffusion_pytorch_model.safetensors").read_bytes()
    place = data / "models"
    place.mkdir()
    for name in ("flux1-dev", "clip_l", "t5xxl_fp16", "ae"):
        (place / f"{name}.safetensors").write_bytes(content)
    mine = spec(backend="sd-scripts")
    assert weights.problems(mine) == []
    (place / "clip_l.safetensors").write_bytes(content[:-1])
    (place / "ae.safetensors").write_bytes(b"<html>Sign in</html>")
    found = weights.problems(mine)
    assert len(found) == 2
    assert "(--clip_l) is not a complete safetensors file (" in found[0] and "; delete it, then" in found[0]
    assert "(--ae) is not a complete safetensors file" in found[1] and "fetch-model flux-dev" in found[1]


def test_a_file_is_held_against_the_tables_sum_and_one_that_is_not_there_says_what_to_do(hub, tmp_path, monkeypatch):
    """Faults of the network: tests/network/guards/test_download.py; the progress: test_main.py."""
    hub.refusal, target = None, tmp_path / "m" / "model.safetensors"
    hub.files = {"sub dir/ü.safetensors": bytes(range(256)) * 2_000}
    for file, sha256, says in (
        ("sub dir/ü.safetensors", "ab" * 32, "arrived damaged .* download it again"),
        ("other", "", r"does not exist.*; or correct \[downloads\] in models.toml"),
        ("sub dir/ü.safetensors", "", ""),
    ):
        with pytest.raises(runs.RunError, match=says) if says else contextlib.nullcontext():
            weights.fetch(target.name, [("me/model", file, target, sha256)], lambda _: None)
        assert target.exists() == (not says)
    assert target.read_bytes() == hub.files["sub dir/ü.safetensors"]
    assert hub.requests[-2][1] == f"/me/model/resolve/{COMMIT}/sub dir/ü.safetensors"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HANGPROOF_DOWNLOAD_STALL_S", "1")
    monkeypatch.setenv("HTTP_PROXY", "http://me:secret@127.0.0.1:8")
    monkeypatch.setenv("NO_PROXY", "")
    says = r"no data from 127\.0\.0\.1:9 for 1 s \(.*refused.* names the proxy 127\.0\.0\.1:8\)\. Check the network"
    with pytest.raises(runs.RunError, match=says):
        weights.fetch("x", [("me/model", "y", tmp_path / "y", "")], lambda _: None)
