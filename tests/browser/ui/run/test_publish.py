"""A LoRA is published from the page: cancelled, and begun again."""

from hub_repo_server import TOKEN, serving_hub
from runs_helpers import sources
from ui_helpers import lora_file, photos, serving
from ui_page import a_tab, show_run
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
            page.get_by_label("Description").fill("typed in the browser")
            page.get_by_label("Repository").fill("me/cup")
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
