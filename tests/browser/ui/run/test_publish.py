"""The part of a run that publishes its LoRA, in a real browser, against a hub on loopback."""

from hub_repo_server import serving_hub
from ui_helpers import lora_file, serving, write_run


def test_without_a_login_it_says_where_to_log_in(tab, data, tmp_path):
    folder = write_run(data, "My cat", state="completed")
    lora_file(folder / "my-cat.safetensors", 40)
    with (
        serving_hub() as hub,
        serving(data, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "none"), HF_TOKEN="") as server,
    ):
        tab.goto(f"{server.url}/?run={folder.name}")
        tab.get_by_role("button", name="Publish on Hugging Face").click()
        tab.get_by_text("You are not logged in to Hugging Face").first.wait_for()
        tab.get_by_role("button", name="Publish", exact=True).click()
        tab.get_by_test_id("not-published").wait_for()
        assert not hub.repositories
