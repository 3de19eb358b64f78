"""In a real browser: values are judged while they are typed, beside their field; what is impossible does not start."""

import json
import re
import subprocess
import sys

import pytest
from runs_helpers import picture, pictures
from ui_helpers import PROJECT
from ui_page import a_tab, choose_tiny, drop, field, open_page

import runs
from runs import job, pin


@pytest.fixture
def page(browser, server):
    with a_tab(browser) as tab:
        open_page(tab, server)
        yield tab


def ready(page, tmp_path, name: str) -> None:
    """A run on the tiny model that could start: a name, a trigger word and three images."""
    field(page, "name").fill(name)
    field(page, "trigger").fill("ohwx")
    choose_tiny(page)
    drop(page, *(picture(tmp_path / f"{name}-{n}.png", size=(96, 64 + 32 * n)) for n in range(3)), count=3)


def fill(page, key: str, value: str) -> None:
    """Type a value and leave the field, as a user does."""
    if not field(page, key).is_visible():
        page.get_by_text("More settings").click()
    field(page, key).fill(value)
    field(page, key).blur()


def bad(page, key: str, text: str):
    """Wait for an error beside a field."""
    page.locator(f"#{key} .hp-field-error").get_by_text(text).first.wait_for()
    assert field(page, key).get_attribute("aria-invalid") == "true"
    assert field(page, key).get_attribute("aria-describedby")


def warned(page, key: str, text: str | re.Pattern[str]):
    """Wait for a warning beside a field; it is above Start too."""
    page.locator(f"#{key} .hp-field-warning").get_by_text(text).first.wait_for()
    page.locator("#plan .hp-findings .hp-warn").get_by_text(text).first.wait_for()
    assert field(page, key).get_attribute("aria-invalid") is None


def not_started(page, server, name: str, text: str) -> None:
    """Press Start, and wait for the reason; no run was created."""
    page.locator("#start").click()
    page.locator("#problem").get_by_text(text).first.wait_for()
    page.locator("#problem").get_by_text("Not started").wait_for()
    assert not (server.data / "outputs" / name).exists()


# "No sanity check" ------------------------------------------------------------------------------------------------------


def test_a_rank_a_learning_rate_and_a_length_that_make_no_sense_are_explained_before_start(page, server, tmp_path):
    ready(page, tmp_path, "huge")
    fill(page, "rank", "1000000000")
    bad(page, "rank", "Must be 16384 or less")
    page.locator("#plan .hp-findings .hp-bad").get_by_text("Rank: Must be 16384 or less").wait_for()
    not_started(page, server, "huge", "Must be 16384 or less")
    fill(page, "rank", "4")
    page.locator("#rank .hp-field-error").wait_for(state="detached")

    field(page, "name").fill("odd")
    fill(page, "learning_rate", "5")
    warned(page, "learning_rate", re.compile(r"Learning rate 5 is [\d,]+ times the usual rate with ada"))
    fill(page, "alpha", "1000")
    warned(page, "alpha", "Alpha 1000 is 250 times the rank")
    fill(page, "repeats", "1000")
    fill(page, "epochs", "16")
    warned(page, "epochs", "The run has 48,000 steps, and each image is used 16,000 times")
    fill(page, "resolution", "1024")
    warned(page, "resolution", "The largest image has 96 × 128 pixels")
    fill(page, "max_train_steps", "2000000000")
    bad(page, "epochs", "The run has 2,000,000,000 steps. At 10 steps per second that takes 2,315 days")
    not_started(page, server, "odd", "2,000,000,000 steps")


# "Wrong values" -----------------------------------------------------------------------------------------------------------


def test_a_note_below_a_dropdown_can_be_seen(tab, bare_server):
    open_page(tab, bare_server)
    fill(tab, "name", "no gpu")
    tab.locator("#model .hp-field-warning").get_by_text("finds no GPU it can use").wait_for()
    note = tab.locator("#model p.hp-field-warning").first
    on_top = """(note) => {
      note.parentElement.scrollIntoView({ block: "center" }); // not the note: that would scroll inside its block
      const box = note.getBoundingClientRect();
      return note.contains(document.elementFromPoint(box.x + 20, box.y + box.height / 2));
    }"""
    assert note.evaluate(on_top)


def test_taken_names_and_wrong_values_are_explained_in_plain_english(page, server):
    taken = server.data / "outputs" / "First-Light"
    taken.mkdir(parents=True)
    try:
        field(page, "name").fill("First Light")
        bad(page, "name", "A run named 'First Light' already exists in")
        field(page, "name").fill("first light")
        bad(page, "name", "Windows and macOS do not tell it from 'first-light'; choose another name")
        field(page, "name").fill("Second Light")
        page.locator("#name .hp-field-error").wait_for(state="detached")
    finally:
        taken.rmdir()

    field(page, "name").fill("words")
    for key, value, text in (
        ("repeats", "-1", "Must be 1 or more"),
        ("epochs", "", "Enter a value; the default is 16"),
        ("resolution", "500", "Must be a multiple of 32"),
        ("learning_rate", "0,0001", "Not a number; write for example 0.0001"),
        ("max_train_steps", "1.5", "Not a whole number; write for example 4"),
        ("seed", "99999999999", "Must be less than 4294967296"),
    ):
        fill(page, key, value)
        bad(page, key, text)
        label = page.locator("#plan .hp-findings .hp-bad")
        label.get_by_text(text).first.wait_for()
    shown = page.locator("body").inner_text()
    assert not re.search(r"Input should|unable to parse|\(got |validation error", shown)


# "A bad flag value dies after Start" --------------------------------------------------------------------------------------


def test_an_option_that_the_trainer_does_not_have_or_refuses_is_named_while_it_is_typed(page, server, tmp_path):
    ready(page, tmp_path, "prodigy")
    for line, text in (
        ("max_grad_nrm=1", "max_grad_nrm: diffusers has no such flag; did you mean max_grad_norm?"),
        ("optimizer_type=prodigy", "optimizer_type: prodigy: not supported; use adafactor or adamw8bit or adamw"),
        ("optimizer_args=weight_decay=much", "optimizer_args: weight_decay=much: must be a number"),
        ("lr_scheduler=cosinus", "lr_scheduler: cosinus: not supported; use constant or"),
    ):
        fill(page, "flags", line)
        bad(page, "flags", text)
    not_started(page, server, "prodigy", "cosinus: not supported")


def test_an_error_of_the_trainers_parser_leads_the_runs_page_and_its_log(browser, server, tmp_path, monkeypatch):
    """A script that was changed by hand still reaches the trainer, whose command line is long."""
    monkeypatch.setenv("HANGPROOF_DATA", str(server.data))
    spec = runs.make({"name": "by hand", "model": "tiny-flux", "trigger": "ohwx"})
    folder = runs.create(spec, pictures(tmp_path / "in"))
    changed = spec.changed(extra={"optimizer_type": "nonsense", "training_comment": "long " * 900})
    runs.save(folder, changed)
    pin.write(folder, job.made(job.resolve(changed, folder), (folder / "run.toml").read_bytes()))
    done = subprocess.run(
        [sys.executable, "-m", "monitor", "run", str(folder)], cwd=PROJECT, capture_output=True, text=True, timeout=300
    )
    line = "error: --optimizer_type nonsense: not supported; use adafactor or adamw8bit or adamw"
    assert done.returncode == 1 and line in done.stderr + done.stdout
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "failed" and status["restarts"] == 0
    last = (folder / "training.log").read_text().splitlines()[-1]
    assert last.startswith("=== ") and line in last
    with a_tab(browser) as page:
        page.goto(f"{server.url}/?run={folder.name}")
        page.locator("body.hp-open").wait_for()
        page.get_by_text("The trainer rejected its arguments").first.wait_for()
        page.get_by_text(line).first.wait_for()
        assert "launcher reports exit code" not in page.locator("body").inner_text()
