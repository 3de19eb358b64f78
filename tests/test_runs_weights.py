"""A base model that is missing, incomplete or not to be had is told before a run is started, and in words."""

import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from runs_helpers import PROJECT, data, spec  # noqa: F401

import presets
import runs
from runs import weights

REPO = "someone/a-flux"


class Hub(BaseHTTPRequestHandler):
    """Answers every question with the server's `status`, after its `nap_s`."""

    def do_HEAD(self):
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        self.server.gone.wait(self.server.nap_s)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.status, server.nap_s, server.asked, server.gone = 200, 0.0, [], threading.Event()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_TOKEN_PATH", "HF_HUB_CACHE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    yield server
    server.gone.set()
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    """A whole model in diffusers' layout."""
    folder = tmp_path_factory.mktemp("model") / "flux"
    made = subprocess.run(
        [sys.executable, "-m", "trainer.tiny_flux", str(folder)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert made.returncode == 0, made.stderr
    return folder


def of(name: str) -> "runs.RunSpec":
    return spec(extra={"pretrained_model_name_or_path": str(name)})


def test_the_table_of_a_models_parts_is_the_trainers():
    from trainer.models import PARTS

    table = presets.families()["flux"]["parts"]
    assert table == {part: [word for word in words if word] for part, words in PARTS.items()}


def test_a_whole_folder_is_fine_and_one_that_is_not_names_each_file(flux, tmp_path):
    assert weights.problems(of(flux)) == []
    broken = shutil.copytree(flux, tmp_path / "flux")
    (broken / "vae" / "config.json").unlink()
    (broken / "text_encoder" / "model.safetensors").unlink()
    (broken / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(
        (flux / "transformer" / "diffusion_pytorch_model.safetensors").read_bytes()[:-100]
    )
    (broken / "text_encoder_2" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    (told,) = weights.problems(of(broken))
    assert str(broken) in told and "download the whole folder again" in told
    assert "vae/config.json is missing" in told and "text_encoder/model.safetensors is missing" in told
    assert "transformer/diffusion_pytorch_model.safetensors was cut short" in told
    assert "text_encoder_2/model.safetensors is a git-lfs pointer" in told


def test_weights_in_several_files_are_all_looked_for(flux, tmp_path):
    broken = shutil.copytree(flux, tmp_path / "flux")
    place = broken / "transformer"
    (place / "diffusion_pytorch_model.safetensors").rename(place / "one.safetensors")
    index = place / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}')
    (told,) = weights.problems(of(broken))
    assert "transformer/two.safetensors is missing" in told and "one.safetensors" not in told
    index.write_text("{")
    assert "index.json cannot be read" in weights.problems(of(broken))[0]


def test_a_path_that_is_no_folder_is_told(tmp_path):
    assert "model folder missing" in weights.problems(of(tmp_path / "nowhere"))[0]
    assert "model folder missing" in weights.problems(of("./nowhere"))[0]
    single = tmp_path / "flux.safetensors"
    single.write_bytes(b"x")
    (told,) = weights.problems(of(single))
    assert "is a single file" in told and "kohya's sd-scripts" in told


def test_a_model_in_the_cache_needs_no_hub(flux, hub, tmp_path):
    place = tmp_path / "hf" / "hub" / "models--someone--a-flux"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc123")
    shutil.copytree(flux, place / "snapshots" / "abc123")
    assert weights.problems(of(REPO), ask=True) == [] and hub.asked == [] and weights.note(of(REPO)) == ""
    (place / "snapshots" / "abc123" / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    hub.status = 404
    assert weights.problems(of(REPO), ask=True) and hub.asked  # half of it is not enough


@pytest.mark.parametrize(
    "status, said",
    [
        (200, None),
        (302, None),
        (401, "accept its licence at"),
        (403, "accept its licence at"),
        (404, "neither a folder here nor a model"),
        (503, "does not answer (it answers 503); check the network"),
    ],
)
def test_what_the_hub_says_is_told(hub, status, said):
    hub.status = status
    found = weights.problems(of(REPO), ask=True)
    assert len(found) == (said is not None) and (said or "") in "".join(found)
    assert hub.asked == [(f"/{REPO}/resolve/main/model_index.json", None)]
    assert weights.problems(of(REPO)) == []  # unasked, the hub is left alone
    assert len(hub.asked) == 1
    assert "begins by fetching it" in weights.note(of(REPO))


def test_a_hub_that_is_not_there_or_never_answers_is_told_in_time(hub, monkeypatch):
    monkeypatch.setattr(weights, "ASK_S", 0.3)
    hub.nap_s = 60
    (told,) = weights.problems(of(REPO), ask=True)
    assert "does not answer (nothing within 0 s); check the network, or fetch it elsewhere" in told
    monkeypatch.setattr(weights, "ASK_S", 30)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "does not answer" in weights.problems(of(REPO), ask=True)[0]


def test_what_needs_no_hub_to_be_known_is_told_without_it(hub, monkeypatch):
    (told,) = weights.problems(spec())
    assert "accept its licence: open http" in told and "HF_TOKEN" in told
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert weights.problems(spec()) == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (told,) = weights.problems(spec())
    assert "HF_HUB_OFFLINE keeps it from being fetched" in told and "hf download" in told
    assert hub.asked == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert weights.problems(spec(), ask=True) == [] and hub.asked[0][1] == "Bearer hf_secret"


def test_a_single_file_that_was_cut_short_is_told(data, flux, monkeypatch):  # noqa: F811
    whole = (flux / "vae" / "diffusion_pytorch_model.safetensors").read_bytes()
    place = data / "models"
    place.mkdir()
    for name in ("flux1-dev", "clip_l", "t5xxl_fp16", "ae"):
        (place / f"{name}.safetensors").write_bytes(whole)
    mine = spec(backend="sd-scripts")
    assert weights.problems(mine) == []
    (place / "clip_l.safetensors").write_bytes(whole[:-1])
    (place / "ae.safetensors").write_bytes(b"<html>Sign in</html>")
    found = weights.problems(mine)
    assert len(found) == 2
    assert f"(--clip_l) was cut short: it has {len(whole) - 1} of {len(whole)} bytes; delete it, then" in found[0]
    assert "(--ae) is no safetensors file" in found[1] and "fetch-model flux-dev" in found[1]


def test_the_monitor_tells_it_and_starts_nothing(data, hub, tmp_path, monkeypatch):  # noqa: F811
    from runs_helpers import pictures, python

    hub.status = 404
    folder = runs.create(of(REPO), pictures(tmp_path / "in"))
    done = python("-m", "monitor", "start", folder.name)
    assert (
        done.returncode == 1
        and "cannot be started" in done.stderr
        and "neither a folder here nor a model" in done.stderr
    )
    assert not (folder / "training.log").exists() and not (folder / "status.json").exists()
