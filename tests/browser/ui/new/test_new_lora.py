"""The tab New LoRA in a real browser: its first screen, a new user's first run, its folds, a model's download."""

import json
import re

import ui_page as ui
from draft_helpers import photo
from hub_server import serving as serving_hub
from ui_helpers import PROJECT, alone, photos, serving

import presets
from ui import jobs

SHIM = str(PROJECT / "tests/support/shims/nvml")


def test_the_first_page_says_what_to_do_next_and_follows_the_images(tab, bare_server, tmp_path):
    ui.open_page(tab, bare_server)
    note = tab.locator("#model-note")
    note.get_by_text("No NVIDIA GPU found.").wait_for()
    tab.locator("#gpu-fold").get_by_text("GPU memory and trainer: 12 GB, Built-in (Diffusers)").wait_for()
    link = note.get_by_role("link", name=re.compile("accept the licence", re.IGNORECASE))
    link.wait_for()
    assert link.get_attribute("href") == "https://huggingface.co/black-forest-labs/FLUX.1-dev"
    assert link.get_attribute("target") == "_blank" and "noopener" in (link.get_attribute("rel") or "")
    shown = tab.locator("#new, .hp-step").first.inner_text()
    assert "hf auth login" not in shown and "http" not in shown and "--set" not in shown
    assert tab.locator(".hp-field-error").count() == 0  # nothing is wrong yet
    ui.field(tab, "name").fill("no gpu")
    ui.field(tab, "name").blur()
    warning = tab.locator("#model p.hp-field-warning").first
    warning.get_by_text("finds no GPU it can use").wait_for()
    on_top = """(note) => {
      if (!note.isConnected) return false; // another answer has drawn it anew
      note.parentElement.scrollIntoView({ block: "center" }); // not the note: that would scroll inside its block
      const box = note.getBoundingClientRect();
      return note.contains(document.elementFromPoint(box.x + 20, box.y + box.height / 2));
    }"""
    ui.until(lambda: warning.evaluate(on_top), "a note below a dropdown can be seen")
    tab.locator("#start").click()
    licence = tab.locator("#problem").get_by_role("link").first
    licence.wait_for()
    assert licence.get_attribute("href") == link.get_attribute("href") and "noopener" in licence.get_attribute("rel")

    # Repeats and epochs follow the number of images until they are typed.
    ui.drop(tab, *(photo(tmp_path / f"{n}.png", n) for n in range(4)), count=4)
    ui.become(tab, repeats="24", epochs="20")
    ui.field(tab, "epochs").fill("3")
    tab.locator("#plan").get_by_text("288 steps").wait_for()

    # Samples are on by default and never stop a start; time, memory and disk have their source.
    estimates = tab.get_by_test_id("estimates")
    estimates.get_by_text("none: there is no trigger word, prompt or caption to draw").wait_for()
    ui.caption(tab, "0.png").fill("a grey square --w 9999")
    ui.saved(tab, "0.png")
    estimates.get_by_text(re.compile(r"every \d+ steps \(“a grey square")).wait_for()
    for text in ("On a GPU of this size: about", "GB at 512 pixels", "model download 33.7 GB"):
        estimates.get_by_text(text, exact=False).first.wait_for()


def test_a_model_sets_its_values_and_the_page_says_what_each_tier_needs(tab, bare_server):
    ui.open_page(tab, bare_server)
    ui.gpu_fold(tab)
    for name, hidden in (("FLUX.1 Kontext dev", False), ("Z-Image Turbo", True)):
        ui.field(tab, "model").click()
        tab.get_by_role("option", name=re.compile(rf"^(✓\s*)?{re.escape(name)}")).first.click()
        tab.locator("#control_dir").wait_for(state="hidden" if hidden else "visible")
    ui.become(tab, tier="12G", backend="musubi", resolution="1024")
    tab.locator("#fetch").wait_for()
    tab.locator("#backend .hp-field-error").get_by_text("musubi-tuner is not installed").wait_for()
    needs = [f"{row['label']} · uses {row['needs_gb']:g} GB" for row in presets.tiers_of("z-image-turbo").values()]
    ui.until(lambda: tab.locator("#tier label").all_inner_texts() == needs, "what each tier needs")
    table = tab.get_by_test_id("models")
    assert table.count() == 0, "sent when it is opened"
    ui.press(tab.get_by_text("Which model fits my GPU?"), table.get_by_text("HunyuanImage 2.1").first)


def test_one_click_starts_a_run_and_leaves_the_draft_as_it_is(tab, data, tmp_path):
    """On a machine with a GPU."""
    environment = {**alone(tmp_path), "CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": SHIM, "FAULTS_NVML_GIB": "24"}
    with serving(data, **environment) as server:
        ui.open_page(tab, server)
        tab.locator("#model-note").get_by_text("GPU found: Stand-in, 24 GB").wait_for()
        ui.gpu_fold(tab)
        ui.until(tab.locator("#tier input[value='20G']").is_checked, "the tier of this GPU")
        tab.locator("#tier input[value='12G']").click()
        tab.locator("#model-note").get_by_text("single blocks").wait_for()
        ui.choose_tiny(tab)
        ui.field(tab, "name").fill("my own")
        ui.drop(tab, *(photo(tmp_path / f"{n}.png", n) for n in range(5)), count=5)
        ui.caption(tab, "0.png").fill("mine")
        ui.saved(tab, "0.png")
        ui.press(tab.locator("#try-it"), tab.get_by_test_id("run-name").get_by_text("first-try"))
        assert len(list((data / "datasets" / "first-try").glob("*.txt"))) == 8
        assert tab.locator(".hp-bad:visible").count() == 0
        ui.press(tab.get_by_role("tab", name="New LoRA"), ui.caption(tab, "0.png"))
        assert ui.captions(tab)["0.png"] == "mine" and ui.field(tab, "name").input_value() == "my own"
        assert tab.locator("#tier input[value='12G']").is_checked()


# The fields and buttons that can be used; a group of radio buttons is one, and a link in a sentence is none.
CONTROLS = """() => new Set([...document.querySelectorAll("button, input, textarea, select")]
  .filter((one) => one.checkVisibility({ visibilityProperty: true }) && !one.closest(".visually-hidden, [aria-hidden=true]"))
  .map((one) => (one.type === "radio" ? one.closest("fieldset") : one))).size"""


def test_what_a_run_needs_is_on_the_first_screen(tab, server):
    tab.set_viewport_size({"width": 1440, "height": 900})
    ui.open_page(tab, server)
    tab.locator("#plan .hp-plan").wait_for()

    def in_order() -> bool:
        places = [tab.locator(name).bounding_box() for name in (".hp-drop", "#name", "#trigger", "#start")]
        tops = [box["y"] for box in places]
        return tops == sorted(tops) and all(box["y"] + box["height"] <= 900 for box in places)

    ui.until(in_order, "images, name, trigger word and Start on the screen, in this order")
    assert tab.evaluate(CONTROLS) <= 25

    tab.set_viewport_size({"width": 390, "height": 844})
    ui.drop(tab, *photos("chelsea.png"), count=1)
    tab.evaluate("scrollTo(0, 0)")

    def height(name: str) -> float:
        return tab.locator(name).first.bounding_box()["y"]

    ui.until(lambda: height(".hp-card img") + 100 < height("#start") < 844, "the picture above Start")
    tab.mouse.wheel(0, 600)
    tab.wait_for_function("scrollY > 300")
    ui.until(lambda: 0 < height("#start") < 844, "Start stays in sight")


def test_nothing_moves_once_the_page_is_open(tab, bare_server):
    shown = "['#model-note', '#plan', '#start'].map((one) => document.querySelector(one).getBoundingClientRect().y)"
    tab.add_init_script(f"addEventListener('hangproof-open', () => (window.places = {shown}))")
    ui.open_page(tab, bare_server)
    tab.locator("#note-model-0").wait_for()  # a machine without a GPU
    tab.evaluate("hangproof.flush()")
    tab.wait_for_timeout(1000)  # until the answer to that would have moved something
    assert tab.evaluate("places") == tab.evaluate(shown)


TRAIN = "accelerate launch -m trainer --pretrained_model_name_or_path tiny-flux --network_dim 6 --blocks_to_swap 4\n"


def test_settings_come_from_a_template_and_a_file_and_a_sweep_is_planned(tab, server, tmp_path):
    ui.open_page(tab, server)
    tab.get_by_role("button", name="Sample images during training").hover()
    tab.mouse.down()
    ui.field(tab, "epochs").fill("-1")
    tab.locator("#note-epochs-0").wait_for()  # moves the page: the release is beside the button
    tab.mouse.up()
    ui.field(tab, "prompts").wait_for()
    ui.field(tab, "epochs").fill("3")
    ui.field(tab, "name").fill("walk")
    ui.field(tab, "trigger").fill("ohwx")
    ui.choose_tiny(tab)
    tab.get_by_role("button", name="More settings").click()
    assert tab.locator("#template, #sweep-rank, #rehearse").count() == 0
    for name in ("setup", "sweep", "rehearsal"):
        ui.unfold(tab.locator(f"#{name} button.label-wrap").first)

    ui.field(tab, "rank").fill("32")
    own = tab.get_by_label("Name of a new template")
    own.fill("Mine <img src=x>")
    own.press("Enter")
    tab.locator("#setup").get_by_text("Saved as “Mine <img src=x>”.", exact=True).wait_for()
    ui.field(tab, "rank").fill("8")
    ui.field(tab, "template").click()
    tab.get_by_role("option", name=re.compile("^Mine")).click()
    tab.locator("#use-settings").click()
    ui.become(tab, rank="32")
    for label in ("Delete this template", "Delete it now? Press again"):
        tab.get_by_role("button", name=label).click()
    tab.locator("#setup").get_by_text("Deleted.", exact=True).wait_for()

    (tmp_path / "train.sh").write_text(TRAIN)
    images = photo(tmp_path / "photos" / "0.png", 0).parent
    photo(images / "1.png", 1)
    (tmp_path / "dataset.toml").write_text(f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = {json.dumps(str(images))}")
    files = [str(tmp_path / name) for name in ("train.sh", "dataset.toml")]
    tab.locator("#import-files input[type=file]").set_input_files(files)
    tab.locator("#import-files").get_by_text("dataset").first.wait_for()
    ui.press(tab.locator("#import-read"), tab.locator("#setup-preview").get_by_text("Left out: can hang").first)
    assert ui.field(tab, "rank").input_value() == "32", "nothing changes before it is used"
    tab.locator("#import-images").click()
    ui.shows(tab, 2)
    tab.locator("#use-settings").click()
    ui.become(tab, rank="6")

    ui.field(tab, "sweep-rank").fill("2, four")
    plan, go = tab.locator("#sweep-plan"), tab.locator("#sweep-start")
    plan.get_by_text("'four' is not").wait_for()
    ui.until(go.is_disabled, "a sweep with a wrong value cannot be queued")
    ui.field(tab, "sweep-rank").fill("2, 4")
    plan.get_by_text("walk-r2, walk-r4").wait_for()
    ui.until(go.is_enabled, "the sweep can be queued")
    tab.locator("#rehearse").wait_for()
    assert not list((server.data / "outputs").glob("walk*")), "nothing is written before a button is pressed"


def test_the_plan_and_the_other_tabs_follow_the_edited_script(tab, server, tmp_path):
    ui.open_page(tab, server)
    ui.field(tab, "name").fill("edited")
    ui.choose_tiny(tab)
    ui.drop(tab, photo(tmp_path / "0.png", 0), count=1)
    ui.unfold(tab.locator("#script-fold button.label-wrap").first)
    tab.locator("#edit-script").click()
    tab.locator("#script .cm-content[contenteditable=true]").click()
    for key in ("Control+End", "Backspace"):
        tab.keyboard.press(key)
    tab.keyboard.insert_text(" --max_train_epochs 3\n")
    tab.locator("#plan").get_by_text("× 3 epochs").wait_for()
    second = tab.context.new_page()
    ui.open_page(second, server)
    second.locator("#plan").get_by_text("× 3 epochs").wait_for()
    for label in ("Use the generated script", "Discard your script? Press again"):
        tab.get_by_role("button", name=label).click()
    for page in (tab, second):
        page.locator("#plan").get_by_text("× 3 epochs").wait_for(state="detached")

    # The reasons why there is no script are not edited.
    tab.locator("#edit-script").click()
    for name, editable in (("edited", "true"), ("", "false"), ("again", "true")):
        ui.field(tab, "name").fill(name)
        tab.locator(f"#script .cm-content[contenteditable={editable}]").wait_for()


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
            ui.open_page(tab, server)
            ui.field(tab, "model").click()
            tab.get_by_role("option", name=re.compile("My own Flux")).click()
            ui.press(tab.locator("#fetch"), tab.get_by_test_id("fetch-error").get_by_text("licence"))
            hub.refusal, hub.nap_s = None, 0.5  # a minute and a half a file, until it is shown
            tab.locator("#fetch").click()  # it can be repeated
            progress = re.compile(r"my-\w+\.safetensors: [\d.]+ of [\d.]+ GB")
            tab.get_by_test_id("fetching").get_by_text(progress).wait_for()
            server.stop(hard=True)  # the page's server dies; the download continues
        assert jobs.running(data / "models", "fetch-mine")
        hub.nap_s = 0
        with ui.serving_again([tab], data, server.port, **environment):
            tab.get_by_test_id("fetching").wait_for(state="detached")
            tab.locator("#model-note").get_by_text("my-ae.safetensors").first.wait_for(state="detached")
        tab.errors.clear()
        for name in ("my-flux", "my-ae"):
            assert (data / "models" / f"{name}.safetensors").read_bytes() == WEIGHTS
        assert jobs.wait(data / "models", "fetch-mine", 60).state == "done"
