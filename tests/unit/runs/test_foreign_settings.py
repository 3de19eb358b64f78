"""What a foreign configuration sets: plain values by flag, everything else refused with a reason."""

from runs.foreign_settings import SHOWN, Row, Settings, lines_of, shown


def test_plain_values_become_flags_others_are_refused_with_a_reason_and_a_secret_is_hidden():
    found = Settings()
    for flag, value in {"seed": 5.0, "sdpa": True, "betas": [0.5, "x"], "off": False, "a b": 1, "c": [{}]}.items():
        found.add(flag, value)
    assert found.flags == {"seed": ["5"], "sdpa": [], "betas": ["0.5", "x"]}
    assert [one.text for one in found.rows] == ["Not the name of an option", "Not a plain value"]
    assert Row("--wandb_api_key", "abc", "changed", "").value == "…" and Row("--seed", "5", "same", "").value == "5"
    assert shown("a\n b") == "a b" and len(shown("x" * 1000)) == SHOWN
    assert lines_of("# note\n a cat \n\n") == ["a cat"] and len(lines_of("a\n" * 1000)) == 100
