"""The commands of a script are found in each shell's language; what only the shell knows is unknown."""

import re

import pytest
from hypothesis import example, given, settings, strategies as st
from lint_corpus import lint

from presets import PresetError
from presets.training import commands


def test_a_variable_that_is_not_set_at_the_top_level_alone_is_unknown():
    for language, text in (
        ("sh", 'X=1\n[ -d /x ] && X=2\nprogram "$X"'),
        ("sh", 'X=1\nread -r X\nprogram "$X"'),
        ("sh", 'f() { X=2; }\nX=1\nf\nprogram "$X"'),
        ("cmd", 'set X=1\nif exist y set X=2\nprogram "%X%"'),
        ("cmd", 'set X=1\nset /p X=\nprogram "%X%"'),
        ("ps", '$X = "1"\nif ($y) { $X = "2" }\nprogram "$X"'),
        ("ps", '$X = "1"\n$global:X = "2"\nprogram "$X"'),
        ("ps", '$X = "1"\nforeach ($X in 1..2) { }\nprogram "$X"'),
    ):
        assert [word.value for word in commands(text, language)[-1].words] == ["program", None]
        first = next(line for line in text.splitlines() if line.endswith(("=1", '= "1"')))
        plain = f"{first}\n{text.splitlines()[-1]}"
        assert [word.value for word in commands(plain, language)[-1].words] == ["program", "1"]


def test_variables_that_grow_without_end_are_refused():
    long = "x" * 60_000
    for language, text in (
        ("sh", "X=x\n" + "X=$X$X\n" * 24),
        ("sh", f"X=({long})\nprogram " + '"${X[@]}" ' * 20),
        ("cmd", "set X0=x\n" + "".join(f"set X{n + 1}=%X{n}%%X{n}%\n" for n in range(24))),
        ("cmd", f"set X={long}\nprogram " + "%X%" * 20),
        ("ps", f'$X = "{long}"\nprogram ' + '"$X" ' * 20),
    ):
        with pytest.raises(PresetError, match="more than 1,000,000 characters"):
            commands(text, language)


@settings(max_examples=150, deadline=None)
@given(text=st.text("ab \\'\"$(){}`\n;&|<>#=^%!", max_size=25), language=st.sampled_from(["sh", "cmd", "ps"]))
@example("cat <<EOF\nprogram", "sh")
def test_any_text_is_read_to_its_end(text, language):
    for command in commands(text, language):
        assert all(0 <= w.start < w.end <= len(text) for w in command.words)


T = "accelerate launch sd/flux_train_network.py"


def test_flags_that_the_command_does_not_get_are_named_with_their_line(tmp_path):
    for text, file in (
        (f"{T} --seed 1 \\\n  # a comment \\\n  --lr 3\n", "t.sh"),
        (f"{T} --seed 1 ^ \r\n  --lr 3\r\n", "t.bat"),
        (f"{T} --seed 1 `\r\n\r\n  --lr 3\r\n", "t.ps1"),
    ):
        path = tmp_path / file
        path.write_bytes(text.encode())
        code, _, value = lint(path, "--fix")
        (finding,) = [one for one in value["findings"] if one["id"] == "cut-off"]
        assert code == 1 and finding["level"] == "fail"
        assert path.read_text().splitlines()[finding["line"] - 1].strip() == "--lr 3"
        path.write_bytes(re.sub(r" ([\\^`]) ?(\r?)\n(  # .*\n|\r\n)?", r" \1\2\n", text).encode())
        assert "cut-off" not in {finding["id"] for finding in lint(path)[2]["findings"]}
