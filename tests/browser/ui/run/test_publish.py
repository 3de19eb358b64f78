"""The part of a run that publishes its LoRA, in a real browser, against a hub on loopback."""

import pytest
from hub_repo_server import TOKEN, serving_hub
from ui_helpers import browsing, serving
from ui_page import a_tab, faint_texts, nameless_controls, until

from tests.network.launch.test_publish import folder, hub  # noqa: F401 - fixtures

WAIT_MS = 90_000


def _open(page, url):
    page.goto(f"{url}/?run=My-cat")
    page.get_by_role("button", name="Publish on Hugging Face").click(timeout=WAIT_MS)


@pytest.mark.long
def test_a_lora_is_published_and_a_killed_server_does_not_interrupt_it(hub, folder):  # noqa: F811
    hub.stall_put.set()
    data = folder.parent.parent
    with browsing() as browser:
        with serving(data) as server, a_tab(browser) as page:
            _open(page, server.url)
            repository = page.get_by_label("Repository")
            repository.wait_for(timeout=WAIT_MS)
            assert repository.input_value() == "My-cat"
            assert page.get_by_label("Base model", exact=False).last.input_value() == "black-forest-labs/FLUX.1-dev"
            assert not page.get_by_label("Public", exact=True).is_checked()
            repository.fill("someone/else")
            page.get_by_role("button", name="Publish", exact=True).click()
            page.get_by_text("the token may not write there").wait_for(timeout=WAIT_MS)
            repository.fill("me/my-cat")
            page.get_by_label("Description").fill("Cats <script>alert(1)</script>")
            page.get_by_role("button", name="Preview the card").click()
            card = page.get_by_role("textbox", name="The card", exact=True)
            card.wait_for(timeout=WAIT_MS)
            assert "instance_prompt: mycat" in card.input_value()
            assert not nameless_controls(page) and not faint_texts(page)
            page.get_by_role("button", name="Publish", exact=True).click()
            page.get_by_test_id("publishing").get_by_text("Sending").wait_for(timeout=WAIT_MS)
            until(lambda: any(method == "PUT" for method, _ in hub.requests), "nothing was sent")
            server.stop(hard=True)
            page.goto("about:blank")
        hub.stall_put.clear()
        with serving(data) as server, a_tab(browser) as page:
            _open(page, server.url)
            page.get_by_test_id("published").get_by_text("/me/my-cat").wait_for(timeout=WAIT_MS)
    repo = hub.repositories["me/my-cat"]
    assert repo.private and repo.files["My-cat.safetensors"] and len(hub.puts) == len(set(hub.puts))
    assert not [path for path in data.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.long)])
def test_without_a_login_it_says_where_to_log_in(folder, monkeypatch, tmp_path, dark):  # noqa: F811
    with serving_hub() as running:
        for name, value in {"HF_ENDPOINT": running.url, "HF_HOME": str(tmp_path / "none")}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        with browsing() as browser, serving(folder.parent.parent) as server, a_tab(browser) as page:
            page.emulate_media(color_scheme="dark" if dark else "light")
            _open(page, server.url)
            page.get_by_text("You are not logged in to Hugging Face").first.wait_for(timeout=WAIT_MS)
            page.get_by_role("button", name="Publish", exact=True).click()
            page.get_by_test_id("not-published").wait_for(timeout=WAIT_MS)
        assert not running.repositories
