"""A LoRA is published from the page: cancelled, and begun again; its licence is never that of another run."""

from hub_repo_server import TOKEN, serving_hub
from runs_helpers import sources
from ui_helpers import lora_file, photos, serving, write_run
from ui_page import a_tab, open_page, show_run, until
from ui_requests import files_with

import runs


def test_a_lora_is_published_with_what_was_typed(browser, data, tmp_path):
    spec = runs.make({"name": "cup", "model": "tiny-flux", "backend": "diffusers", "trigger": "tok"})
    folder = runs.create(spec, sources(photos("coffee.png")))
    (folder / "status.json").write_text('{"state": "completed", "step": 4, "planned_steps": 4}')
    lora = lora_file(folder / "cup.safetensors", 4)
    with serving_hub() as hub, a_tab(browser) as page:
        online = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        with serving(data, **online) as server:
            hub.stall_put.set()
            show_run(page, server, "cup")
            opener = page.get_by_role("button", name="Publish on Hugging Face")
            publish = page.get_by_role("button", name="Publish", exact=True)
            opener.click()
            page.get_by_label("Repository").fill("me/cup")
            page.get_by_label("Description").fill("typed in the browser")
            page.reload()  # as after a cut of the network
            page.locator("body.hp-open").wait_for()
            opener.click()
            until(lambda: page.get_by_label("Description").input_value() == "typed in the browser", "what was typed")
            lora_file(folder / "cup-step00000008.safetensors", 8)  # saved since
            page.locator("#publish-lora input").click()
            page.get_by_role("option", name="step00000008").wait_for()
            page.locator("#publish-licence input").click()
            page.get_by_role("option", name="Apache").click()
            publish.click()
            page.get_by_test_id("publishing").get_by_text("Sending").wait_for()
            publish.wait_for(state="hidden")
            page.get_by_role("button", name="Cancel", exact=True).click()
            page.locator("#job-publish .hp-problem").get_by_text("Cancelled").wait_for()
            hub.stall_put.clear()
            publish.click()
            page.get_by_test_id("published").get_by_text("/me/cup").wait_for()
    repo = hub.repositories["me/cup"]
    assert repo.private and len(repo.commits) == 1 and b"typed in the browser" in repo.files["README.md"]
    assert repo.files["cup.safetensors"][-100:] == lora.read_bytes()[-100:], "its weights"
    assert files_with(TOKEN, data) == []


def test_a_model_without_a_known_licence_does_not_get_that_of_the_run_before(tab, server):
    open_page(tab, server)
    for model, licence in (("sdxl", "CreativeML Open RAIL++-M"), ("tiny-flux", "")):
        folder = write_run(server.data, f"of {model}", "completed")
        (folder / "run.toml").write_text(f'name = "of {model}"\nmodel = "{model}"\nbackend = "diffusers"\n')
        lora_file(folder / f"{folder.name}.safetensors", 4)
        show_run(tab, server, folder.name)
        tab.get_by_role("button", name="Publish on Hugging Face").click()
        tab.locator(f"#publish-fold [data-drawn-for='{folder.name}']").wait_for(state="attached")
        until(lambda licence=licence: tab.locator("#publish-licence input").input_value() == licence, licence)
