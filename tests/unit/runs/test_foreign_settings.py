"""What a foreign configuration sets: plain values by flag, everything else refused with a reason."""

import pytest

from runs.files import RunError
from runs.foreign_settings import MAX_FLAGS, SHOWN, ImageFolder, Row, Settings, lines_of, shown, tables


def test_plain_values_become_flags_others_are_refused_with_a_reason_and_a_secret_is_hidden():
    found = Settings()
    for flag, value in {"seed": 5.0, "sdpa": True, "betas": [0.5, "x"], "off": False, "a b": 1, "c": [{}]}.items():
        found.add(flag, value)
    assert found.flags == {"seed": ["5"], "sdpa": [], "betas": ["0.5", "x"]}
    assert [one.text for one in found.rows] == ["Not the name of an option", "Not a plain value"]
    assert Row("--wandb_api_key", "abc", "changed", "").value == "…" and Row("--seed", "5", "same", "").value == "5"
    assert shown("a\n b") == "a b" and len(shown("x" * 1000)) == SHOWN
    assert lines_of("# note\n a cat \n\n") == ["a cat"] and len(lines_of("a\n" * 1000)) == 100
    assert lines_of("a" * 2000) == ["a" * 1000] and shown("x" * SHOWN) == "x" * SHOWN
    assert Row("note", "s3://me:pass@host/x", "unsupported", "").value == "…"
    assert tables([{"a": 1}, 3]) == [{"a": 1}] and tables({"a": 1}) == []


def test_a_setting_is_named_as_its_file_names_it_and_is_no_flag_once_it_is_decided():
    found = Settings()
    for setting in (("network_dim", 8, "LoRA rank"), ("sdpa", True, "sdpa"), ("off", ""), (3, 1)):
        found.add(*setting)
    found.add("betas", [True, False, 1e16, 2.0])
    assert found.labels == {"network_dim": "LoRA rank"} and found.rows == []
    found.take("network_dim", "field", "Rank"), found.take("sdpa", "same", ""), found.take("gone", "field", "")
    found.refuse("a\nb", [1], "none of ours"), found.add("c", [None], "see")
    assert found.rows == [
        Row("LoRA rank", "8", "field", "Rank"), Row("--sdpa", "on", "same", ""), Row("a b", "[1]", "unsupported", "none of ours"),
        Row("see", "…", "unsupported", "Not a plain value"),
    ]  # fmt: skip
    assert found.flags == {"betas": ["true", "false", "1e+16", "2"]}
    found.flags = {f"flag{number}": [] for number in range(MAX_FLAGS - 1)}
    found.add("last", 1)
    with pytest.raises(RunError, match=f"more than {MAX_FLAGS} settings"):
        found.add("one_more", 1)


def test_a_folder_has_a_plain_number_of_repeats_or_none():
    found = Settings()
    found.add_folder("in", 5, " a\n cat ")
    for repeats in (True, 0, "5", 1, 10**6, 10**6 + 1):
        found.add_folder("in", repeats, 3)
    wanted = [ImageFolder("in", 5, "a cat"), *(ImageFolder("in", n) for n in (None, None, None, 1, 10**6, None))]
    assert found.folders == wanted
