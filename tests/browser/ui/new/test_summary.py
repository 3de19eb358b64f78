"""In a real browser: every base model can be chosen, sets its own values, and shows what each VRAM choice needs."""

import re

from ui_page import assert_accessible, become, field, gpu_fold, more_settings, open_page, until

import presets


def choose(page, name: str) -> int:
    """Choose the base model whose label starts with a name. Returns how many the page offers."""
    field(page, "model").click()
    option = page.get_by_role("option", name=re.compile(rf"^(✓\s*)?{re.escape(name)}")).first
    option.wait_for()
    offered = page.get_by_role("option").count()
    option.click()
    return offered


def test_a_model_sets_its_values_and_the_page_says_what_each_tier_needs(tab, bare_server):
    open_page(tab, bare_server)
    note = tab.locator("#model-note")
    more_settings(tab)
    gpu_fold(tab)
    become(tab, tier="12G", backend="diffusers", resolution="512", rank="16", alpha="4", learning_rate="0.0008")

    assert choose(tab, "Z-Image Turbo") == len(presets.models())
    become(tab, tier="12G", backend="musubi", resolution="1024", rank="16", alpha="8", learning_rate="0.0001")
    note.get_by_text("./start.sh musubi").wait_for()
    note.get_by_text("4 model files").wait_for()
    tab.locator("#fetch").wait_for()
    tab.locator("#backend .hp-field-error").get_by_text("musubi-tuner is not installed").wait_for()
    tab.locator("#control_dir").wait_for(state="hidden")
    needs = [f"{row['label']} · uses {row['needs_gb']:g} GB" for row in presets.tiers_of("z-image-turbo").values()]
    until(lambda: tab.locator("#tier label").all_inner_texts() == needs, "what each tier needs")

    field(tab, "rank").fill("7")
    field(tab, "rank").blur()
    choose(tab, "FLUX.1 Kontext dev")
    tab.locator("#control_dir").wait_for()
    choose(tab, "Krea 2 Raw")
    tab.locator("#control_dir").wait_for(state="hidden")
    become(tab, tier="12G", backend="musubi", rank="7")

    tab.reload()
    tab.locator("body.hp-open").wait_for()
    gpu_fold(tab)
    become(tab, tier="12G", backend="musubi")
    until(lambda: "Krea 2" in field(tab, "model").input_value(), "the model after a reload")
    tab.emulate_media(color_scheme="dark")
    tab.set_viewport_size({"width": 390, "height": 900})
    table = tab.get_by_test_id("models")
    assert table.count() == 0, "sent when it is opened"
    tab.get_by_text("Which model fits my GPU?").click()
    table.wait_for()
    table.get_by_text("HunyuanImage 2.1").first.wait_for()
    assert_accessible(tab, "#models")
