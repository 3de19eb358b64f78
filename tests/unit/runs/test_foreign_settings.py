"""What the files of another trainer set: plain values, each shown on one short line."""

import pytest

from runs.files import RunError
from runs.foreign_settings import MAX_FLAGS, SHOWN, ImageFolder, Row, Settings, shown


def test_a_value_is_shown_in_one_short_line_a_secret_not_at_all():
    assert Row("--wandb_api_key", "abc", "changed", "").value == "…" and Row("--seed", "5", "same", "").value == "5"
    assert Row("note", "s3://me:pass@host/x", "unsupported", "").value == "…"
    assert shown("a\n b") == "a b" and len(shown("x" * 1000)) == SHOWN and shown("x" * SHOWN) == "x" * SHOWN


def test_plain_values_become_flags_until_they_are_decided_and_others_are_refused_with_a_reason():
    found = Settings()
    found.add("betas", [True, False, 1e16, 2.0, "x"])
    found.add("sdpa", True), found.take("sdpa", "same", "")
    found.refuse("a\nb", [1], "none of ours"), found.add("c", [None], "see"), found.add("a b", 1)
    assert found.rows == [
        Row("--sdpa", "on", "same", ""),
        Row("a b", "[1]", "unsupported", "none of ours"), Row("see", "…", "unsupported", "Not a plain value"),
        Row("a b", "1", "unsupported", "Not the name of an option"),
    ]  # fmt: skip
    assert found.flags == {"betas": ["true", "false", "1e+16", "2", "x"]}
    found.add_folder("in", 5, " a\n cat ")
    for repeats in (True, 0, "5", 1, 10**6, 10**6 + 1):
        found.add_folder("in", repeats, 3)
    wanted = [ImageFolder("in", 5, "a cat"), *(ImageFolder("in", n) for n in (None, None, None, 1, 10**6, None))]
    assert found.folders == wanted
    found.flags = {f"flag{number}": [] for number in range(MAX_FLAGS - 1)}
    found.add("last", 1)
    with pytest.raises(RunError, match=f"more than {MAX_FLAGS} settings"):
        found.add("one_more", 1)
