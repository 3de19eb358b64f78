"""A new user's first run in a real browser: the GPU found, one click to try, proposals, estimates, samples, the hub's login."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from draft_helpers import stored_forms
from ui_helpers import PROJECT, alone, kill_runs, serving, squares
from ui_page import RUN_S, caption, captions, choose_tiny, drop, field, open_page, saved, state_is, until

SHIM = str(PROJECT / "benchmarks" / "shims" / "nvml")
GOOD, USER = "hf_good0123456789abcdef", "Ann <b>x</b>"


def values(page, *keys: str) -> list[str]:
    return [field(page, key).input_value() for key in keys]


def become(page, expected: list[str], *keys: str) -> None:
    """Wait until these fields have these values."""
    until(lambda: page.wait_for_timeout(50) or values(page, *keys) == expected, f"{keys} are {expected}")


def estimates(page):
    return page.get_by_test_id("estimates")


# What is read first -------------------------------------------------------------------------------------------------


def test_the_first_page_says_what_to_do_next_in_plain_words_with_links(tab, bare_server):
    open_page(tab, bare_server)
    note = tab.locator("#model-note")
    note.get_by_text("No NVIDIA GPU found.").wait_for()
    assert tab.get_by_label("12 GB").is_checked()
    link = note.get_by_role("link", name=re.compile("accept the licence", re.IGNORECASE))
    link.wait_for()
    assert link.get_attribute("href") == "https://huggingface.co/black-forest-labs/FLUX.1-dev"
    assert link.get_attribute("target") == "_blank" and "noopener" in (link.get_attribute("rel") or "")
    shown = tab.locator("#new, .hp-step").first.inner_text()
    assert "hf auth login" not in shown and "http" not in shown and "--set" not in shown
    assert tab.locator(".hp-field-error").count() == 0  # nothing is wrong yet
    tab.locator("#start").click()
    licence = tab.locator("#problem").get_by_role("link").first
    licence.wait_for()
    assert licence.get_attribute("href") == link.get_attribute("href") and "noopener" in licence.get_attribute("rel")
    tab.get_by_text("Which model fits my GPU?").click()
    for name in ("FLUX.1-dev", "FLUX.1-schnell", "Tiny Flux"):
        tab.get_by_test_id("models").get_by_text(re.compile(re.escape(name))).first.wait_for()


def test_the_gpu_found_is_named_and_its_tier_is_selected(tab, tmp_path):
    environment = {**alone(tmp_path), "CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": SHIM, "FAULTS_NVML_GIB": "24"}
    with serving(tmp_path / "data", **environment) as server:
        open_page(tab, server)
        tab.locator("#model-note").get_by_text("Stand-in").wait_for()
        assert "GPU found: Stand-in, 24 GB" in tab.locator("#model-note").inner_text()
        assert tab.get_by_label("20 GB and more", exact=True).is_checked()
        tab.get_by_label("12 GB", exact=True).click()  # a choice stays
        tab.locator("#model-note").get_by_text("single blocks").wait_for()
        until(lambda: any(form.get("tier") == "12G" for form in stored_forms(server.data)), "it is stored")
        tab.reload()
        tab.locator("#model-note").get_by_text("single blocks").wait_for()
        assert tab.get_by_label("12 GB", exact=True).is_checked()


# One click ----------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(1200)
def test_one_click_trains_a_lora_and_leaves_the_draft_as_it_is(tab, tmp_path):
    data = tmp_path / "data"
    try:
        with serving(data, **alone(tmp_path)) as server:
            open_page(tab, server)
            field(tab, "name").fill("my own")
            drop(tab, *squares(tmp_path / "own", 1), count=1)
            caption(tab, "0000.png").fill("mine")
            saved(tab, "0000.png")
            tab.locator("#try-it").click()
            tab.get_by_test_id("run-name").get_by_text("first-try").wait_for()
            state_is(tab, "completed", seconds=RUN_S)
            folder = data / "outputs" / "first-try"
            assert (folder / "first-try.safetensors").is_file()
            assert len(list((folder / "sample").glob("*.png"))) >= 10
            status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
            assert status["restarts"] == 0 and status["step"] == status["planned_steps"] == 320
            assert len(list((data / "datasets" / "first-try").glob("*.txt"))) == 8
            tab.get_by_role("tab", name="New LoRA").click()
            assert captions(tab) == {"0000.png": "mine"} and values(tab, "name") == ["my own"]
            tab.locator("#try-it").click()  # and again: another name
            tab.get_by_test_id("run-name").get_by_text("first-try 2").wait_for()
    finally:
        kill_runs(data)


# Proposals ----------------------------------------------------------------------------------------------------------


def test_repeats_and_epochs_follow_the_number_of_images_until_they_are_typed(tab, bare_server, tmp_path):
    open_page(tab, bare_server)
    drop(tab, *squares(tmp_path / "in", 20), count=20)
    become(tab, ["10", "10"], "repeats", "epochs")
    tab.locator("#plan").get_by_text("2,000 steps").wait_for()
    tab.reload()
    tab.get_by_test_id("image-count").get_by_text("20 images").wait_for()
    become(tab, ["10", "10"], "repeats", "epochs")
    drop(tab, *squares(tmp_path / "in", 30, 20), count=50)
    become(tab, ["5", "8"], "repeats", "epochs")
    assert not tab.locator("#propose").is_visible()
    field(tab, "epochs").fill("3")
    tab.locator("#plan").get_by_text("750 steps").wait_for()
    drop(tab, *squares(tmp_path / "in", 50, 50), count=100)
    tab.locator("#plan").get_by_text("1,500 steps").wait_for()
    become(tab, ["5", "3"], "repeats", "epochs")  # typed values stay
    button = tab.locator("#propose")
    button.get_by_text("Use proposed: 2 repeats × 10 epochs").wait_for()
    button.click()
    become(tab, ["2", "10"], "repeats", "epochs")
    tab.locator("#plan").get_by_text("2,000 steps").wait_for()
    button.wait_for(state="hidden")


# Estimates ----------------------------------------------------------------------------------------------------------


def test_time_memory_and_disk_are_estimated_with_their_source(tab, bare_server, tmp_path):
    open_page(tab, bare_server)
    field(tab, "trigger").fill("tok")
    drop(tab, *squares(tmp_path / "in", 20), count=20)
    estimates(tab).get_by_text("every 200 steps").wait_for()
    text = estimates(tab).inner_text()
    assert re.search(r"Time\s+On a GPU of this size: about \d+ h .*twice the time of the 16 GB tier", text)
    assert re.search(r"GPU memory\s+about \d+\.\d GB at 512 pixels", text)
    assert re.search(r"Disk\s+about 3\d\.\d GB \(model download 33\.7 GB, checkpoints .* GB free\)", text)
    field(tab, "resolution").fill("1024")
    estimates(tab).get_by_text("at 1024 pixels").wait_for()


def test_an_earlier_run_of_this_machine_gives_the_time(tab, tmp_path):
    import runs

    data = tmp_path / "data"
    folder = data / "outputs" / "before"
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(runs.dumps(runs.make({"name": "before", "model": "tiny-flux", "tier": "12G"})))
    status = {
        "version": 1, "name": "before", "state": "completed", "phase": None, "step": 500, "planned_steps": 500, "step_s": 2.0,
        "restarts": 0, "started_at": "2026-01-01T00:00:00.000Z", "updated_at": "2026-01-01T00:20:00.000Z",
    }  # fmt: skip
    (folder / "status.json").write_text(json.dumps(status))
    with serving(data, **alone(tmp_path)) as server:
        open_page(tab, server)
        choose_tiny(tab)
        drop(tab, *squares(tmp_path / "in", 20), count=20)
        # 2,000 steps of 2 s, and the 200 s that the earlier run took besides its steps
        estimates(tab).get_by_text("about 1 h 10 min (measured on this machine in the run “before”)").wait_for()
        tab.get_by_text("More settings").click()
        field(tab, "rank").fill("8")  # the speed does not depend on it much
        estimates(tab).get_by_text("measured on this machine").wait_for()
        field(tab, "batch_size").fill("2")
        estimates(tab).get_by_text("measured on two CPU cores").wait_for()


# Samples ------------------------------------------------------------------------------------------------------------


def test_samples_are_on_by_default_and_never_stop_a_start(tab, bare_server, tmp_path):
    open_page(tab, bare_server)
    drop(tab, *squares(tmp_path / "in", 20), count=20)
    estimates(tab).get_by_text("none: there is no trigger word, prompt or caption to draw").wait_for()
    assert tab.locator("#sample_every_n_steps .hp-field-error, #prompts .hp-field-error").count() == 0
    caption(tab, "0000.png").fill("a grey square --w 9999")
    saved(tab, "0000.png")
    field(tab, "name").fill("samples")
    estimates(tab).get_by_text("every 200 steps (“a grey square").wait_for()
    field(tab, "trigger").fill("tok")
    estimates(tab).get_by_text("every 200 steps (“tok”)").wait_for()
    tab.get_by_text("Sample images during training").click()
    field(tab, "sample_every_n_steps").fill("0")
    estimates(tab).get_by_text("off").wait_for()


# The hub's login ----------------------------------------------------------------------------------------------------


class Hub(ThreadingHTTPServer):
    """The hub's answer to "who am I", on loopback."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.requests.append(self.path)
        known = self.headers.get("Authorization") == f"Bearer {GOOD}" and self.path == "/api/whoami-v2"
        answer = {"name": USER, "type": "user", "auth": {"accessToken": {"displayName": "laptop", "role": "read"}}}
        body = json.dumps(answer if known else {"error": "Invalid user token."}).encode()
        self.send_response(200 if known else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub():
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def files_with(text: str, *folders: Path) -> list[str]:
    """Files below these folders that contain a text."""
    found = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [path.name for path in found if text.encode() in path.read_bytes()]


def test_the_token_goes_to_the_hubs_own_store_and_nowhere_else(tab, hub, tmp_path):
    environment = {**alone(tmp_path), "HF_ENDPOINT": hub.url, "no_proxy": "127.0.0.1,localhost"}
    sent: list[str] = []
    tab.on("request", lambda request: sent.append(request.url))
    with serving(tmp_path / "data", **environment) as server:
        open_page(tab, server)
        tab.locator("#model-note").get_by_text("accept the licence").wait_for()
        tab.get_by_text("Hugging Face account", exact=True).click()
        token = field(tab, "hub-token")
        token.wait_for()
        assert token.get_attribute("type") == "password"
        create = tab.get_by_role("link", name="Create a token on Hugging Face")
        assert create.get_attribute("href") == f"{hub.url}/settings/tokens" and "noopener" in create.get_attribute(
            "rel"
        )

        token.fill("hf_wrong0123456789")
        tab.get_by_role("button", name="Log in").click()
        tab.get_by_test_id("hub-error").get_by_text("does not know this token").wait_for()
        assert not (tmp_path / "hf" / "token").exists() and "hf_wrong" not in tab.content()
        token.fill("no token\nat all")
        token.press("Enter")
        tab.get_by_test_id("hub-error").get_by_text("This is not a token").wait_for()

        token.fill(GOOD)
        token.press("Enter")
        tab.get_by_test_id("hub-user").get_by_text(f"Logged in as {USER}").wait_for()  # as text, not as markup
        assert (tmp_path / "hf" / "token").read_text() == GOOD
        tab.locator("#model-note").get_by_text("accept the licence").wait_for(state="detached")
        assert not field(tab, "hub-token").is_visible()
        assert GOOD not in tab.content() and GOOD.encode() not in server.get("/config")[1]
        assert not any(GOOD in url for url in [*sent, *hub.requests])
        assert files_with(GOOD, server.data, server.log.parent) and set(files_with(GOOD, tmp_path)) == {
            "token",
            "stored_tokens",
        }
        assert tab.evaluate("JSON.stringify(localStorage) + JSON.stringify(sessionStorage)").count(GOOD) == 0

        tab.reload()
        tab.get_by_text("Hugging Face account", exact=True).click()
        tab.get_by_test_id("hub-user").get_by_text(f"Logged in as {USER}").wait_for()
        tab.get_by_role("button", name="Log out").click()
        tab.get_by_role("button", name="Log in").wait_for()
        assert not (tmp_path / "hf" / "token").exists() and files_with(GOOD, tmp_path) == []
        tab.locator("#model-note").get_by_text("accept the licence").wait_for()


def test_a_token_that_was_just_pasted_stays_when_an_answer_is_late_and_when_the_hub_cannot_be_reached(tab, tmp_path):
    environment = {**alone(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "no_proxy": "127.0.0.1,localhost"}
    held = []
    with serving(tmp_path / "data", **environment) as server:
        open_page(tab, server)
        tab.route("**/queue/join*", lambda route: held.append(route))
        tab.get_by_text("Hugging Face account", exact=True).click()
        field(tab, "hub-token").fill(GOOD)
        until(lambda: tab.wait_for_timeout(50) or held, "the section asks who is logged in")
        for route in held:
            route.continue_()
        tab.unroute("**/queue/join*")
        tab.get_by_role("link", name="Create a token on Hugging Face").wait_for()
        assert field(tab, "hub-token").input_value() == GOOD
        tab.get_by_role("button", name="Log in").click()
        tab.get_by_test_id("hub-error").get_by_text("http://127.0.0.1:9 cannot be reached").wait_for()
        assert field(tab, "hub-token").input_value() == GOOD and not (tmp_path / "hf" / "token").exists()
