"""A trained LoRA is published from two browsers while the page's server is killed."""

import json

import pytest
from hub_repo_server import TOKEN
from two_browsers import open_run, stays_open, two_browsers
from ui_helpers import kill_runs, photos, serving
from ui_page import RUN_S, state_is, until

import runs
from ui import jobs
from ui.run import publish


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run of the tiny model that was not started."""
    data = tmp_path / "data"
    monkeypatch.setenv("HANGPROOF_DATA", str(data))
    fields = {"model": "tiny-flux", "backend": "diffusers", "trigger": "tok", "workers": 0, "max_train_steps": 4}
    length = {"save_every_n_steps": 100, "sample_every_n_steps": 2, "sample_steps": 1, "prompts": ["a cup"]}
    yield runs.create(runs.make({"name": "cup", **fields, **length}), photos("coffee.png"))
    kill_runs(data)


def open_form(page) -> None:
    """Open the part and wait for its form."""
    page.get_by_role("button", name="Publish on Hugging Face").click()
    page.get_by_label("Repository").wait_for()


def choose_licence(page) -> None:
    """Choose a licence: the tiny model has none."""
    page.locator("#publish-licence input").click()
    page.get_by_role("option", name="Apache").click()


def puts(hub) -> int:
    """How many uploads were begun."""
    return [method for method, _ in hub.requests].count("PUT")


@pytest.mark.timeout(1500)
def test_a_trained_lora_is_published_in_two_browsers_while_the_server_is_killed(browser, hub, folder):
    with two_browsers(browser) as (one, other):
        with serving(folder.parent.parent) as server:
            open_run(server, "cup", one, other)
            one.locator("#go").click()
            state_is(one, "completed", seconds=RUN_S)
            state_is(other, "completed")
            hub.stall_put.set()
            for page in (one, other):
                open_form(page)
            description = other.get_by_label("Description")
            description.fill("typed in the other browser")
            one.get_by_label("Repository").fill("me/cup")
            choose_licence(one)
            one.get_by_role("button", name="Publish", exact=True).click()
            for page in (one, other):  # the other browser sees it without a reload, and can cancel it
                page.get_by_test_id("publishing").get_by_text("Sending").wait_for()
            assert not other.get_by_role("button", name="Publish", exact=True).is_enabled()
            assert description.input_value() == "typed in the other browser"
            other.get_by_role("button", name="Cancel", exact=True).click()
            for page in (one, other):
                page.get_by_test_id("not-published").get_by_text("Cancelled").wait_for()
            assert description.input_value() == "typed in the other browser"

            sent = puts(hub)
            other.get_by_label("Repository").fill("me/cup")
            choose_licence(other)
            other.get_by_role("button", name="Publish", exact=True).click()
            until(lambda: puts(hub) > sent, "the second publication sends")
            one.get_by_test_id("publishing").wait_for()
            stays_open(one, other)
            server.stop(hard=True)
        assert jobs.read(folder, publish.JOB).state == "running"
        with serving(folder.parent.parent, port=server.port) as server:
            for page in (one, other):  # each page loads itself again, with what was typed
                page.wait_for_function("window.notReloaded === undefined")
                page.locator("body.hp-open").wait_for()
                open_form(page)
                page.get_by_test_id("publishing").wait_for()
                assert page.get_by_label("Description").input_value() == "typed in the other browser"
                assert page.get_by_label("Repository").input_value() == "me/cup"
            hub.stall_put.clear()
            for page in (one, other):
                page.get_by_test_id("published").get_by_text("/me/cup").wait_for()
    repo = hub.repositories["me/cup"]
    assert repo.private and len(repo.commits) == 1
    assert repo.files["cup.safetensors"][-1000:] == (folder / "cup.safetensors").read_bytes()[-1000:], "its weights"
    assert b"typed in the other browser" in repo.files["README.md"]
    assert json.loads((folder / "published.json").read_text())["repo"] == "me/cup"
    data = folder.parent.parent
    assert not [path for path in data.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
