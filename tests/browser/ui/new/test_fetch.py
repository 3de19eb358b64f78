"""A base model's files are downloaded from the page, with progress and errors, by a process that outlives it."""

import json
import re

import psutil
import pytest
from hub_server import serving as serving_hub
from ui_helpers import serving
from ui_page import field, open_page, until

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


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on loopback with both files."""
    with serving_hub({"flux.safetensors": WEIGHTS, "ae.safetensors": WEIGHTS}) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        yield running


def test_missing_model_files_are_downloaded_and_the_download_outlives_the_page(tab, data, hub):
    hub.refusal = (403, "GatedRepo")
    with serving(data) as server:
        open_page(tab, server)
        choose(tab)
        tab.locator("#fetch").click()
        tab.get_by_test_id("fetch-error").get_by_text("licence").wait_for()
        hub.refusal, hub.nap_s = None, 0.02
        tab.locator("#fetch").click()  # it can be repeated
        tab.get_by_test_id("fetching").get_by_text(re.compile(r"my-\w+\.safetensors: [\d.]+ of [\d.]+ GB")).wait_for()
        tab.locator("#fetch").wait_for(state="hidden")
        (process,) = fetchers(data)
        server.stop(hard=True)  # the page's server dies; the download continues
    assert process.is_running()
    tab.goto("about:blank")  # an open page would reconnect during the next lines
    with serving(data, port=server.port) as server:
        open_page(tab, server)
        tab.errors.clear()
        hub.nap_s = 0
        tab.locator("#model-note").get_by_text("my-ae.safetensors").first.wait_for(state="detached")
        tab.get_by_test_id("fetching").wait_for(state="detached")
    for name in ("my-flux", "my-ae"):
        assert (data / "models" / f"{name}.safetensors").read_bytes() == WEIGHTS
    until(lambda: not fetchers(data), "the process has exited")
