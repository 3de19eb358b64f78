"""Scripts are read as bash reads them; what cannot be known is not guessed."""

import shlex

import pytest
from hypothesis import given, settings, strategies as st
from lint_corpus import run, stand_ins
from seeds import examples

from presets import PresetError, shell
from presets.training import commands

PIECES = [
    "plain", "--flag", "--flag=value", "a b", "it's", 'say "x"', "back\\slash", "$HOME", "`id`", "$(id)", "*", "#", "",
    "é🦊", "new\nline", "tab\t", "!", "~", "{a,b}", "&", ";", "|", "<", ">", "(", ")", "=", "x=1", "-1", "\\", "'",
    '"', "\\\n", "$",
]  # fmt: skip


def double(value: str) -> str:
    return '"' + "".join(f"\\{c}" if c in '\\"$`' else c for c in value) + '"'


def ansi(value: str) -> str:
    return "$'" + "".join(f"\\x{b:02x}" if b < 128 else chr(b) for b in value.encode("ascii", "ignore")) + "'"


values = st.sampled_from(PIECES) | st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=6)


spelled = values.flatmap(
    lambda v: st.sampled_from([shlex.quote(v), double(v)] + ([ansi(v)] if v.isascii() else [])).map(lambda s: (v, s))
)


gaps = st.sampled_from([" ", "  ", "\t", " \\\n", " \\\n    ", "\\\n "])


@settings(max_examples=examples(50), deadline=None)
@given(
    words=st.lists(st.tuples(spelled, gaps), min_size=1, max_size=6),
    end=st.sampled_from(["\n", "", " # note\n", " ; true\n"]),
)
def test_words_and_their_places_are_what_was_written(words, end):
    source = "program"
    for (_, written), gap in words:
        source += gap + written
    found = commands(source + end, "sh")[0]
    assert [w.value for w in found.words] == ["program", *(value for (value, _), _ in words)]
    assert [source[w.start : w.end] for w in found.words] == ["program", *(written for (_, written), _ in words)]


SCRIPT = r"""#!/bin/bash
# a comment 'with an open quote
set -e
NAME="my lora"; OUT=/out
export CUDA_VISIBLE_DEVICES=0
args=( --one "$NAME"   # a comment
  --two=2 'th ree' )
args+=(--four)
cat <<'EOF' > /dev/null
program in a here-document --not 'this
EOF
if true; then program "${args[@]}" --out $OUT"/x" "${OUT}/y" 2>&1 | cat; fi
program a\
b --price "5\$" $'t\tab\'' "" < /dev/null >"/dev/null" 2>/dev/null && program second || true
for i in 1; do program in-a-loop; done
(program in-a-subshell)
X=1 program with-assignment &
wait
"""


def test_a_script_is_read_as_bash_runs_it(tmp_path):
    (tmp_path / "train.sh").write_text(SCRIPT)
    code, started = run(tmp_path / "train.sh", stand_ins(tmp_path, ["program"]))
    ours = []
    for command in commands(SCRIPT, "sh"):
        names = [w.value for w in command.words]
        if "program" in names:
            assert not command.opaque
            ours.append(names[names.index("program") + 1 :])
    assert code == 0 and ours == [one.words for one in started] and len(ours) == 6
    assert ours[0] == ["--one", "my lora", "--two=2", "th ree", "--four", "--out", "/out/x", "/out/y"]


def test_what_is_unknown_has_no_value_and_where_it_may_be_several_words_the_command_is_opaque():
    for written in ("$UNKNOWN", '"$@"', '"${rest[@]}"', "`cat flags`", "${X:-a b}", '"$(id)"', '"a${X}b"'):
        (command,) = commands(f"program --a {written} --b\n", "sh")
        assert [w.value for w in command.words] == ["program", "--a", None, "--b"]
        assert command.opaque == (written[0] != '"' or "@" in written)


def test_an_empty_variable_is_no_word_and_a_number_before_a_redirection_none():
    text = "M=\nfor s in 1; do program a $M \"$M\" $'b' \\\n  2>&1 c; done\n"
    assert [word.value for word in commands(text, "sh")[-1].words] == ["program", "a", "", "b", "c"]


def test_an_escape_that_is_no_character_is_shown_as_such():
    (command,) = commands(r"program $'\x41\ud800\U110000\UFFFFFFFF'", "sh")
    assert command.words[1].value == "A\ufffd\ufffd\ufffd"


def test_text_that_the_parser_cannot_finish_is_refused(monkeypatch):
    monkeypatch.setattr(shell, "PARSE_S", 0.2)
    with pytest.raises(PresetError, match="cannot be read within 0.2 s"):
        shell.Bash(")a b\n" * 20_000).commands()
    assert [word.value for word in shell.Bash("echo 1").commands()[0].words] == ["echo", "1"]
