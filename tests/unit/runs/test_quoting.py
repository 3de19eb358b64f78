"""A script that is rendered from anything yields exactly the intended argument list."""

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from cmd_words import cmd_words
from hypothesis import HealthCheck, given, settings, strategies as st
from runs_helpers import PROJECT, arguments_of, encode, executable, pictures, python, run_script, spec, stub
from seeds import examples

import presets
import runs
from runs.command import launch_options, module
from runs.quoting import quote, quote_cmd

NASTY = [
    "'", '"', "`id`", "$(touch /tmp/never)", "${HOME}", "$HOME", "\\", "\\\\", "\n", "\r\n", "\t", " ", "  ", "!!",
    "*", "?", "~", "-", "--resume", "--", ";", "&&", "|", ">", "<", "(", ")", "{a,b}", "[a]", "#", "%PATH%", "^",
    "=", "\x01", "\x7f", "\x1b[31m", "é", "日本語", "🦊", "\u202e", "\u2028", "\ufeff", "ı", "a b",
    "'\\''", '$"x"', "$'x'", "\\\n", "EOF", "\x85",
]  # fmt: skip
letters = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
text = st.lists(st.sampled_from(NASTY) | letters, max_size=6).map("".join)
path_text = st.lists(st.sampled_from([*NASTY, "\udcff", "\udc80a"]) | letters, min_size=1, max_size=4).map("".join)
options = st.sampled_from(["pretrained_model_name_or_path", "training_comment", "metadata_title", "network_dropout"])
specs = st.builds(
    dict,
    name=text.map(lambda t: f"{t}x"),
    trigger=text,
    prompts=st.lists(text, max_size=2),
    tier=st.sampled_from(["12G", "16G", "20G"]),
    backend=st.sampled_from(["diffusers", "sd-scripts"]),
    gpus=st.sampled_from([1, 2]),
    extra=st.dictionaries(options, text, max_size=3),
    learning_rate=st.floats(1e-9, 1.0, exclude_min=True),
)


def intended(made, folder: Path, resume: Path | None, platform: str) -> list[str]:
    """All words after the program that a script of `made` starts."""
    start = module(made.backend, presets.trainer_of(made.model, made.backend)["script"])
    lines = [*launch_options(made), start, runs.arguments(made, folder, resume, platform)]
    return [word for line in lines for word in line]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory) -> Path:
    return stub(tmp_path_factory.mktemp("stub"))


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(specs, path_text, path_text, st.none() | path_text, st.sampled_from(["C", "C.UTF-8"]))
def test_bash_reads_exactly_the_intended_arguments(launcher, tmp_path_factory, fields, folder, root, resume, locale):
    script = launcher.parent / "train.sh"
    with mock.patch.dict(os.environ, {"HANGPROOF_DATA": "/data/" + root.encode("utf-8", "replace").decode()}):
        made = spec(**fields)
        where = Path("/out") / folder
        state = Path(resume) if resume else None
        script.write_bytes(runs.script(made, where, state, "linux").encode("utf-8", "surrogateescape"))
        wanted = intended(made, where, state, "linux")
    assert arguments_of(run_script(script, launcher, LC_ALL=locale)) == list(map(encode, wanted))


def test_a_project_folder_with_a_hostile_name_works(tmp_path, launcher):
    project = tmp_path / "-rf * it's $(touch pwned) `id` 日本 🦊\nline"
    project.mkdir()
    for part in ("runs", "presets", "guards", "trainer/arguments.py"):
        source, target = PROJECT / part, project / part
        target.parent.mkdir(exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
    images = pictures(tmp_path / "images")
    made = python(
        "-m", "runs", "new", "--name", "a b", "--images", str(images), "--model", "tiny-flux",
        cwd=project, HANGPROOF_DATA="", PYTHONPATH=str(project),
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    script = project / "outputs/a-b/train.sh"
    words = arguments_of(run_script(script, launcher))
    assert words[words.index(b"--output_dir") + 1] == encode(str(script.parent))
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("gpus", [1, 2])
def test_what_is_named_is_started_else_what_the_environment_has_else_path(tmp_path, monkeypatch, gpus):
    name, named_by = ("python", "TRAINER_PYTHON") if gpus == 1 else ("accelerate", "ACCELERATE")
    named, own, last = (tmp_path / place / name for place in ("named", "venv/bin", "path"))
    for program in (named, own, last.with_name("python3") if gpus == 1 else last):
        executable(program, '#!/bin/sh\nprintf "%s\\n" "$0" "$PYTHONPATH" "$PWD"\n')
    monkeypatch.setenv("SD_SCRIPTS_VENV", str(tmp_path / "venv"))
    script = tmp_path / "train.sh"
    script.write_text(runs.script(spec(backend="sd-scripts", gpus=gpus), tmp_path, platform="linux"))

    def started(**env: str) -> list[str]:
        env = {"PATH": f"{tmp_path / 'path'}:/usr/bin:/bin", **env}
        return run_script(script, None, **env).stdout.decode().splitlines()

    assert started(**{named_by: str(named)}) == [str(named), str(PROJECT), str(PROJECT)]
    assert started(PYTHONPATH="/before") == [str(own), f"{PROJECT}:/before", str(PROJECT)]
    own.unlink()
    assert started()[0].startswith(str(last))
    bare = tmp_path / "bare"
    bare.mkdir()
    for tool in ("bash", "dirname"):
        (bare / tool).symlink_to(shutil.which(tool))
    without = run_script(script, None, PATH=str(bare))
    assert without.returncode == 127 and b"./start.sh sd-scripts" in without.stderr
    if gpus == 1:  # a named launcher has the interpreter beside it, or none: another environment is not used silently
        launcher, beside = (executable(tmp_path / "other" / one, named.read_text()) for one in ("accelerate", "python"))
        assert started(ACCELERATE=str(launcher))[0] == str(beside)
        beside.unlink()
        lacks = run_script(script, None, ACCELERATE=str(launcher))
        assert lacks.returncode == 127 and b"other/python" in lacks.stderr


@pytest.mark.slow
def test_one_process_has_the_environment_that_accelerate_gives_it(tmp_path, data):
    """Everything that the real `accelerate launch` adds for the options of one process, the script exports."""
    (tmp_path / "probe.py").write_text("import json, os; print(json.dumps(dict(os.environ)))")
    made = spec(mixed_precision="fp16")
    options = ["--mixed_precision", "fp16", "--num_processes", "1", "--num_machines", "1", "--dynamo_backend", "no"]
    options += ["--num_cpu_threads_per_process", "1", str(tmp_path / "probe.py")]
    launched = python("-m", "accelerate.commands.accelerate_cli", "launch", *options)
    assert launched.returncode == 0, launched.stderr
    program = executable(tmp_path / "python", f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/probe.py"\n')
    script = tmp_path / "train.sh"
    script.write_text(runs.script(made, tmp_path, platform="linux"))
    own = json.loads(run_script(script, program).stdout)
    given = json.loads(launched.stdout.splitlines()[-1])
    added = {name: value for name, value in given.items() if os.environ.get(name) != value and name != "PYTHONPATH"}
    assert added["ACCELERATE_MIXED_PRECISION"] == "fp16" and {n: own.get(n) for n in added} == added


@settings(max_examples=200, deadline=None)
@given(values=st.lists(text.map(lambda t: re.sub(r"[\r\n\x1a]", "", t)), min_size=1, max_size=4))
def test_a_batch_file_hands_over_exactly_the_intended_arguments(values):
    assert cmd_words(" ".join(map(quote_cmd, values))) == values


def test_a_value_of_backslashes_is_quoted_for_a_batch_file_in_a_moment():
    value, began_s = "\\" * 40_000, time.process_time()
    assert quote_cmd(f"{value} x{value}") == f'^"{value} x{value * 2}^"'
    assert time.process_time() - began_s < 2


def test_what_no_command_line_can_hold_is_refused_and_a_control_character_is_an_escape_on_the_flags_line():
    with pytest.raises(runs.RunError, match="batch file"):
        quote_cmd("two\nlines")
    with pytest.raises(runs.RunError, match="NUL"):
        quote("a\0b")
    quoted = [quote(f"it's{chr(number)}\\ 写真") for number in (*range(1, 32), 127)]
    assert list(map(quote, ("a b", "it's", "a/b.c=1", ""))) == ["'a b'", "'it'\\''s'", "a/b.c=1", "''"]
    assert all(one.isprintable() and one.startswith("$'") for one in quoted)
