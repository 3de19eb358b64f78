"""Batch files and PowerShell scripts are read as their interpreters read them."""

import time

import pytest
from lint_corpus import SUPPORTED, corpus_text, lint, parsed

from presets.training import commands, dialect


@pytest.mark.parametrize("last", ["\r\n", "", " `"])
@pytest.mark.parametrize("entry", [e for e in SUPPORTED if e["language"] == "ps"])
def test_a_powershell_example_is_read_and_left_to_a_person(tmp_path, entry, last):
    path = tmp_path / "train.ps1"
    text = '$dir = "D:\\my train"\r\n' + corpus_text(entry, last)
    (words,) = parsed(text, path.name)
    assert len(words) == len(entry["words"]) and '"' not in "".join(words)
    for encoding in ("utf-8", "utf-16"):
        path.write_bytes(text.encode(encoding))
        before, (code, _, value) = path.read_bytes(), lint(path, "--fix")
        assert code == 1 and path.read_bytes() == before and value["changes"] == []
        assert "unguarded" in {one["id"] for one in value["findings"]}
        assert not any(one["fixable"] for one in lint(path)[2]["findings"])


BATCH = """@echo off\r
rem program --not this\r
set MODEL=C:\\models\\flux.sft\r
set "NAME=my lora"\r
call program --model %MODEL% --name "%NAME%" ^\r
  --args "a b" c=1 --gone %GONE% --percent 50%% ^\r
  --quoted "C:\\out dir\\x" > log.txt 2>&1\r
if exist x (program second) & program third\r
"""


def test_batch_files_are_read_and_a_long_line_in_a_moment():
    assert dialect("train.bat", "") == dialect("x", BATCH) == "cmd" and dialect("train.sh", "program") == "sh"
    found = [[w.value for w in c.words] for c in commands(BATCH, "cmd")]
    first = next(words for words in found if words[0] == "call")
    assert first[1:] == [
        "program", "--model", "C:\\models\\flux.sft", "--name", "my lora", "--args", "a b", "c=1", "--gone", None,
        "--percent", "50%", "--quoted", "C:\\out dir\\x",
    ]  # fmt: skip
    assert ["program", "second"] in found and ["program", "third"] in found
    places = next(c for c in commands(BATCH, "cmd") if c.words[0].value == "call").words
    assert BATCH[places[5].start : places[5].end] == '"%NAME%"'
    for long in ("a " * 9000, " " * 18_000, "\\" * 30_000, "for " * 15_000):
        started_s = time.process_time()
        commands(long, "cmd")
        assert time.process_time() - started_s < 1.5
