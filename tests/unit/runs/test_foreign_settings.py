"""What a foreign configuration sets: plain values by flag, everything else refused with a reason."""

import pytest

from runs.files import RunError
from runs.foreign_settings import MAX_FLAGS, SHOWN, Row, Settings, lines_of, shown


def test_plain_values_become_flags_and_others_are_refused_with_a_reason():
    found = Settings()
    for flag, value in (("seed", 5.0), ("sdpa", True), ("betas", [0.5, "x"]), ("off", False), ("none", None)):
        found.add(flag, value)
    assert found.flags == {"seed": ["5"], "sdpa": [], "betas": ["0.5", "x"]} and not found.rows
    found.add("table", [{}])
    found.add("two words", 1)
    assert [(one.name, one.outcome, one.text) for one in found.rows] == [
        ("table", "unsupported", "Not a plain value"),
        ("two words", "unsupported", "Not the name of an option"),
    ]
    with pytest.raises(RunError, match="is no configuration"):
        for number in range(MAX_FLAGS):
            found.add(f"flag{number}", 1)


def test_what_is_shown_is_short_and_hides_a_secret():
    assert Row("--wandb_api_key", "abc", "changed", "").value == "…" and Row("--seed", "5", "same", "").value == "5"
    assert shown("a\n b") == "a b" and len(shown("x" * 1000)) == SHOWN
    assert lines_of("# note\n a cat \n\n") == ["a cat"] and len(lines_of("a\n" * 1000)) == 100
