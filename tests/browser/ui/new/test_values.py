"""In a real browser: values are judged while they are typed, beside their field; what is impossible does not start."""

import re

from runs_helpers import picture
from ui_page import choose_tiny, drop, field, more_settings, until


def fill(page, key: str, value: str) -> None:
    """Type a value and leave the field, as a user does."""
    if not field(page, key).is_visible():
        more_settings(page)
    field(page, key).fill(value)
    field(page, key).blur()


def bad(page, key: str, text: str):
    """Wait for an error beside a field; it is above Start too."""
    page.locator(f"#{key} .hp-field-error").get_by_text(text).first.wait_for()
    page.locator("#plan .hp-findings .hp-bad").get_by_text(text).first.wait_for()
    page.locator(f"#{key} [aria-invalid=true]").wait_for()
    shown = "([input, error]) => input.getAttribute('aria-describedby').includes(error.id || 'none')"
    parts = field(page, key), page.locator(f"#{key} .hp-field-error").first
    until(lambda: page.evaluate(shown, [one.element_handle() for one in parts]), "the field names its error")


def test_what_makes_no_sense_or_is_taken_or_is_no_value_is_explained_beside_its_field(page, server, tmp_path):
    field(page, "name").fill("huge")
    field(page, "trigger").fill("ohwx")
    choose_tiny(page)
    drop(page, *(picture(tmp_path / f"{n}.png", size=(96, 64 + 32 * n)) for n in range(3)), count=3)
    fill(page, "rank", "1000000000")
    bad(page, "rank", "Must be 16384 or less")
    page.locator("#start").click()
    problem = page.locator("#problem")
    problem.get_by_text("Must be 16384 or less").first.wait_for()
    problem.get_by_text("Not started").wait_for()
    assert not (server.data / "outputs" / "huge").exists() and field(page, "rank").input_value() == "1000000000"
    fill(page, "rank", "4")
    page.locator("#rank .hp-field-error").wait_for(state="detached")

    field(page, "name").fill("odd")
    fill(page, "learning_rate", "5")
    warning = re.compile(r"Learning rate 5 is [\d,]+ times the usual rate with ada")
    for place in ("#learning_rate .hp-field-warning", "#plan .hp-findings .hp-warn"):
        page.locator(place).get_by_text(warning).first.wait_for()
    page.locator("#learning_rate [aria-invalid]").wait_for(state="detached")
    fill(page, "max_train_steps", "2000000000")
    bad(page, "epochs", "The run has 2,000,000,000 steps. At 10 steps per second that takes 2,315 days")
    fill(page, "max_train_steps", "")

    for key, value, text in (
        ("flags", "max_grad_nrm=1", "max_grad_nrm: diffusers has no such flag; did you mean max_grad_norm?"),
        ("epochs", "", "Enter a value; the default is 16"),
        ("learning_rate", "0,0001", "Not a number; write for example 0.0001"),
    ):
        fill(page, key, value)
        bad(page, key, text)
    shown = page.locator("body").inner_text()
    assert not re.search(r"Input should|unable to parse|\(got |validation error", shown)
