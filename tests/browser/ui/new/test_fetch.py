"""A base model's files are downloaded from the page, with progress and errors, by a process that outlives it."""

import json
import re

from hub_server import serving as serving_hub
from ui_helpers import serving
from ui_page import field, open_page, serving_again

from ui import jobs

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
clip_l = "my-ae.safetensors"
t5xxl = "my-ae.safetensors"
[downloads."my-flux.safetensors"]
repo = "me/model"
path = "flux.safetensors"
[downloads."my-ae.safetensors"]
repo = "me/model"
path = "ae.safetensors"
"""


def test_missing_model_files_are_downloaded_and_the_download_outlives_the_page(tab, data, tmp_path):
    data.mkdir()
    (data / "models.toml").write_text(MODEL)
    with serving_hub({"flux.safetensors": WEIGHTS, "ae.safetensors": WEIGHTS}) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        hub.refusal = (403, "GatedRepo")
        with serving(data, **environment) as server:
            open_page(tab, server)
            field(tab, "model").click()
            tab.get_by_role("option", name=re.compile("My own Flux")).click()
            tab.locator("#fetch").click()
            tab.get_by_test_id("fetch-error").get_by_text("licence").wait_for()
            hub.refusal, hub.nap_s = None, 0.5  # a minute and a half a file, until it is shown
            tab.locator("#fetch").click()  # it can be repeated
            progress = re.compile(r"my-\w+\.safetensors: [\d.]+ of [\d.]+ GB")
            tab.get_by_test_id("fetching").get_by_text(progress).wait_for()
            server.stop(hard=True)  # the page's server dies; the download continues
        assert jobs.running(data / "models", "fetch-mine")
        hub.nap_s = 0
        with serving_again([tab], data, server.port, **environment):
            tab.get_by_test_id("fetching").wait_for(state="detached")
            tab.locator("#model-note").get_by_text("my-ae.safetensors").first.wait_for(state="detached")
        tab.errors.clear()
        for name in ("my-flux", "my-ae"):
            assert (data / "models" / f"{name}.safetensors").read_bytes() == WEIGHTS
        assert jobs.wait(data / "models", "fetch-mine", 60).state == "done"
