"""A new user's first run in a real browser: the GPU, one click to try, what each model and tier needs, estimates."""

import re

from draft_helpers import photo
from ui_helpers import PROJECT, alone, serving
from ui_page import become, caption, captions, choose_tiny, drop, field, gpu_fold, open_page, saved, until

import presets

SHIM = str(PROJECT / "tests/support/shims/nvml")


def test_the_first_page_says_what_to_do_next_and_follows_the_images(tab, bare_server, tmp_path):
    open_page(tab, bare_server)
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
    field(tab, "name").fill("no gpu")
    field(tab, "name").blur()
    warning = tab.locator("#model p.hp-field-warning").first
    warning.get_by_text("finds no GPU it can use").wait_for()
    on_top = """(note) => {
      if (!note.isConnected) return false; // another answer has drawn it anew
      note.parentElement.scrollIntoView({ block: "center" }); // not the note: that would scroll inside its block
      const box = note.getBoundingClientRect();
      return note.contains(document.elementFromPoint(box.x + 20, box.y + box.height / 2));
    }"""
    until(lambda: warning.evaluate(on_top), "a note below a dropdown can be seen")
    tab.locator("#start").click()
    licence = tab.locator("#problem").get_by_role("link").first
    licence.wait_for()
    assert licence.get_attribute("href") == link.get_attribute("href") and "noopener" in licence.get_attribute("rel")

    # Repeats and epochs follow the number of images until they are typed.
    drop(tab, *(photo(tmp_path / f"{n}.png", n) for n in range(4)), count=4)
    become(tab, repeats="24", epochs="20")
    field(tab, "epochs").fill("3")
    tab.locator("#plan").get_by_text("288 steps").wait_for()
    tab.locator("#propose").get_by_text("Use proposed: 24 repeats × 20 epochs").click()
    become(tab, repeats="24", epochs="20")

    # Samples are on by default and never stop a start; time, memory and disk have their source.
    estimates = tab.get_by_test_id("estimates")
    estimates.get_by_text("none: there is no trigger word, prompt or caption to draw").wait_for()
    caption(tab, "0.png").fill("a grey square --w 9999")
    saved(tab, "0.png")
    estimates.get_by_text(re.compile(r"every \d+ steps \(“a grey square")).wait_for()
    for text in ("On a GPU of this size: about", "GB at 512 pixels", "model download 33.7 GB"):
        estimates.get_by_text(text, exact=False).first.wait_for()


def test_a_model_sets_its_values_and_the_page_says_what_each_tier_needs(tab, bare_server):
    open_page(tab, bare_server)
    gpu_fold(tab)
    for name, hidden in (("FLUX.1 Kontext dev", False), ("Z-Image Turbo", True)):
        field(tab, "model").click()
        tab.get_by_role("option", name=re.compile(rf"^(✓\s*)?{re.escape(name)}")).first.click()
        tab.locator("#control_dir").wait_for(state="hidden" if hidden else "visible")
    become(tab, tier="12G", backend="musubi", resolution="1024")
    tab.locator("#fetch").wait_for()
    tab.locator("#backend .hp-field-error").get_by_text("musubi-tuner is not installed").wait_for()
    needs = [f"{row['label']} · uses {row['needs_gb']:g} GB" for row in presets.tiers_of("z-image-turbo").values()]
    until(lambda: tab.locator("#tier label").all_inner_texts() == needs, "what each tier needs")
    table = tab.get_by_test_id("models")
    assert table.count() == 0, "sent when it is opened"
    tab.get_by_text("Which model fits my GPU?").click()
    table.get_by_text("HunyuanImage 2.1").first.wait_for()


def test_one_click_starts_a_run_and_leaves_the_draft_as_it_is(tab, data, tmp_path):
    """On a machine with a GPU."""
    environment = {**alone(tmp_path), "CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": SHIM, "FAULTS_NVML_GIB": "24"}
    with serving(data, **environment) as server:
        open_page(tab, server)
        tab.locator("#model-note").get_by_text("GPU found: Stand-in, 24 GB").wait_for()
        gpu_fold(tab)
        until(tab.locator("#tier input[value='20G']").is_checked, "the tier of this GPU")
        tab.locator("#tier input[value='12G']").click()
        tab.locator("#model-note").get_by_text("single blocks").wait_for()
        choose_tiny(tab)
        field(tab, "name").fill("my own")
        drop(tab, *(photo(tmp_path / f"{n}.png", n) for n in range(5)), count=5)
        caption(tab, "0.png").fill("mine")
        saved(tab, "0.png")
        tab.locator("#try-it").click()
        tab.get_by_test_id("run-name").get_by_text("first-try").wait_for()
        assert len(list((data / "datasets" / "first-try").glob("*.txt"))) == 8
        assert tab.locator(".hp-bad:visible").count() == 0
        tab.get_by_role("tab", name="New LoRA").click()
        caption(tab, "0.png").wait_for()
        assert captions(tab)["0.png"] == "mine" and field(tab, "name").input_value() == "my own"
        assert tab.locator("#tier input[value='12G']").is_checked()
