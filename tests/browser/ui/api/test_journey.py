"""Actions by gradio_client while two browsers look: both see each of them without a reload, also after the server was killed."""

from pathlib import Path

import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from short_run_helpers import nothing_runs
from two_browsers import open_tab, status, trained_steps, two_browsers
from ui_helpers import PACED, browsing, kill_runs, photos, serving
from ui_page import PATIENCE_S, RUN_S, reaches, state_is, until

import runs

FIELDS = {
    "model": "tiny-flux",
    "backend": "diffusers",
    "trigger": "tok",
    "workers": 0,
    "sample_steps": 1,
    "prompts": ["a cup"],
}
LENGTH = {"max_train_steps": 3000, "save_every_n_steps": 1000, "sample_every_n_steps": 1000}


@pytest.fixture
def data(tmp_path, monkeypatch):
    root = tmp_path / "data"
    monkeypatch.setenv("HANGPROOF_DATA", str(root))
    for name in ("owl", "cat"):
        runs.create(runs.make({"name": name, **FIELDS, **LENGTH}), photos("coffee.png"))
    yield root
    (root / "outputs" / ".queue.json").unlink(missing_ok=True)
    kill_runs(root)


def connect(server) -> Client:
    """A program; its default of 5 s is short for a busy machine."""
    return Client(f"{server.url}/api/", headers=server.headers, verbose=False, httpx_kwargs={"timeout": PATIENCE_S})


def call(client: Client, name: str, *values):
    return client.predict(*values, api_name=f"/{name}")


def refused(client: Client, name: str, *values) -> str:
    """The sentence with which an endpoint refuses."""
    with pytest.raises(AppError) as caught:
        call(client, name, *values)
    return str(caught.value)


def choose(page, run: str) -> None:
    page.locator(f"#run-list [data-run='{run}']").click()
    page.locator(f"[data-testid=run-name][data-run='{run}']").wait_for()


def queue_of(page) -> list[str]:
    return page.locator(".hp-queue ol > li").evaluate_all("all => all.map((one) => one.dataset.run)")


def sees(pages, condition, what: str) -> None:
    """Wait until each browser shows something."""
    for page in pages:
        until(lambda page=page: condition(page), what, RUN_S)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_what_a_program_does_is_seen_in_two_browsers_also_after_the_server_was_killed(data):
    env = {**PACED, "HANGPROOF_GPUS": "test"}  # one run at a time
    cat = data / "outputs" / "cat"
    with browsing() as browser, two_browsers(browser) as pages:
        with serving(data, **env) as server:
            client = connect(server)
            open_tab(server, "runs", *pages)
            for page in pages:
                choose(page, "cat")
            assert call(client, "start_run", "cat")["run"] == "cat"
            for page in pages:
                state_is(page, "running")
                reaches(page, 2)
            assert call(client, "start_run", "owl")["run"] == "owl"  # the GPU is busy
            sees(pages, lambda page: queue_of(page) == ["owl"], "the run that waits")
            call(client, "cancel_in_queue", "owl")
            sees(pages, lambda page: queue_of(page) == [], "an empty queue")
            assert call(client, "sample_now", "cat")["id"]
            sees(pages, lambda page: page.locator(".hp-ev-grid thead strong").count() == 1, "the sample")
            call(client, "pause_run", "cat")
            server.stop(hard=True)  # in the middle of the pause

        with serving(data, port=server.port, **env) as server:
            client = connect(server)
            for page in pages:
                state_is(page, "paused")
            paused_at = call(client, "run_status", "cat")["step"]
            assert trained_steps(cat) == list(range(1, paused_at + 1))
            call(client, "start_run", "cat")
            for page in pages:
                state_is(page, "running")
                reaches(page, paused_at + 1)
            call(client, "stop_run", "cat")
            for page in pages:
                state_is(page, "stopped")
            assert trained_steps(cat) == list(range(1, status(cat)["step"] + 1)), (
                "no step is lost, none is trained twice"
            )
            renamed(client, *pages)
            deleted(client, data, *pages)
    assert nothing_runs(data)


def renamed(client: Client, first, second) -> None:
    """A run that a program renames while both show it: they say so, and show no other run in its place."""
    call(client, "rename_run", "cat", "lynx")
    for page in (first, second):
        page.get_by_text("The run 'cat' was renamed or deleted").wait_for()
        assert page.get_by_test_id("run-name").count() == 0
        page.locator("#run-list [data-run=lynx]").wait_for()
        choose(page, "lynx")


def deleted(client: Client, data: Path, first, second) -> None:
    """A run that a program deletes while a browser asks whether to delete it: a click on Delete deletes no other run."""
    first.locator("#delete").click()
    first.locator("#delete-text").get_by_text("Delete the run 'lynx'").wait_for()
    assert call(client, "delete_run", "lynx")["freed_bytes"] > 0
    for page in (first, second):
        page.get_by_text("The run 'lynx' was renamed or deleted").wait_for()
    first.locator("#delete-ok").click()
    first.locator("#run-notice").get_by_text("lynx").wait_for()
    assert (data / "outputs" / "owl" / "run.toml").is_file() and "There is no run 'lynx'" in refused(
        client, "run_status", "lynx"
    )
