"""A base model's files are downloaded from the page, with progress and errors, by a process that outlives it."""

import hashlib
import json
import re

import psutil
import pytest
from ui_helpers import browsing, serving
from ui_page import a_tab, field, open_page, until

import presets
from tests.network.runs.test_models import Hub, hub  # noqa: F401
from ui.new import fetch

BYTES = 3_000_000
HEAD = json.dumps({"w": {"dtype": "U8", "shape": [BYTES], "data_offsets": [0, BYTES]}}).encode()
WEIGHTS = len(HEAD).to_bytes(8, "little") + HEAD + bytes(BYTES)
MODEL = """
[models.mine]
name = "My own Flux"
backends = ["sd-scripts"]
[models.mine.files]
pretrained_model_name_or_path = "my-flux.safetensors"
ae = "my-ae.safetensors"
[downloads."my-flux.safetensors"]
repo = "me/model"
path = "flux.safetensors"
[downloads."my-ae.safetensors"]
repo = "me/model"
path = "ae.safetensors"
"""


def fetchers(data) -> list[psutil.Process]:
    """Processes that download into this data folder."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()[1:4]  # the download itself, not the process of ui/jobs.py that started it
            if words == ["-m", "runs", "fetch-model"] and process.environ().get("HANGPROOF_DATA") == str(data):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "models.toml").write_text(MODEL)
    yield folder
    for process in fetchers(folder):
        process.kill()


def choose(page) -> None:
    field(page, "model").click()
    page.get_by_role("option", name=re.compile("My own Flux")).click()
    page.locator("#fetch").wait_for()


def test_every_trainer_that_loads_files_gets_a_download(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    for key, model in presets.models().items():
        for backend in presets.backends_of(key):
            by_page = presets.backends()[backend]["loads"] == "files" and not model["generated"]
            assert fetch.model_to_fetch({"model": key, "backend": backend}) == (key if by_page else "")


def test_missing_model_files_are_downloaded_and_the_download_outlives_the_page(data, hub, tmp_path):  # noqa: F811
    hub.content, hub.etag, hub.nap_s = WEIGHTS, hashlib.sha256(WEIGHTS).hexdigest(), 0.5
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "no_proxy": "127.0.0.1,localhost"}
    with browsing() as browser, a_tab(browser) as page:
        with serving(data, **environment) as server:
            open_page(page, server)
            choose(page)
            page.locator("#fetch").click()
            page.get_by_test_id("fetching").get_by_text(
                re.compile(r"my-\w+\.safetensors: [\d.]+ of [\d.]+ GB")
            ).wait_for()
            page.locator("#fetch").wait_for(state="hidden")
            (process,) = fetchers(data)
            server.stop(hard=True)  # the page's server dies; the download continues
        assert process.is_running()
        page.goto("about:blank")  # an open page would reconnect during the next lines
        with serving(data, port=server.port, **environment) as server:
            open_page(page, server)
            page.errors.clear()
            hub.nap_s = 0
            page.locator("#model-note").get_by_text("my-ae.safetensors").first.wait_for(state="detached")
            page.get_by_test_id("fetching").wait_for(state="detached")
            assert not page.locator("#fetch").is_visible()
    for name in ("my-flux", "my-ae"):
        assert (data / "models" / f"{name}.safetensors").read_bytes() == WEIGHTS
    until(lambda: not fetchers(data), "the process has exited")


def test_a_failed_download_shows_its_reason_and_can_be_repeated(data, hub, tmp_path):  # noqa: F811
    hub.content, hub.etag = WEIGHTS, hashlib.sha256(WEIGHTS).hexdigest()
    hub.status = {"HEAD": 403}
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "no_proxy": "127.0.0.1,localhost"}
    with serving(data, **environment) as server, browsing() as browser, a_tab(browser) as page:
        open_page(page, server)
        choose(page)
        page.locator("#fetch").click()
        page.get_by_test_id("fetch-error").get_by_text("licence").wait_for()
        hub.status = {}
        page.locator("#fetch").click()
        page.locator("#model-note").get_by_text("my-ae.safetensors").first.wait_for(state="detached")
    assert (data / "models" / "my-ae.safetensors").read_bytes() == WEIGHTS
