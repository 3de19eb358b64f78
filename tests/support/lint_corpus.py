"""Shared by the tests of lint: scripts as other programs write them, and what a script really starts.

A script runs in bash with stand-ins for accelerate, python and torchrun that record their arguments; a batch file is
read by the parser.
"""

import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tomllib
from runs_helpers import call, executable

from presets.tables import ROOT, read_table
from presets.training import file_name, trainings

CORPUS = tomllib.loads(Path(__file__).with_name("data").joinpath("lint_corpus.toml").read_text(encoding="utf-8"))
SUPPORTED = [entry for entry in CORPUS["command"] if entry["source"] != "kohya-ss/musubi-tuner"]
SCRIPTS = set(read_table("lint.toml")["scripts"])
SWITCHES = set(read_table("lint.toml")["switches"])
PROGRAMS = ("accelerate", "python", "python3", "torchrun", "flux_train_network.py")
# Records the number of its arguments, its name, PYTHONPATH and the arguments, each followed by a NUL.
STAND_IN = """#!/bin/sh
printf '%s\\0' "$#" "${0##*/}" "$PYTHONPATH" "$@" >> "$RECORD"
"""
NEXT_LINE = {"sh": " \\\n  ", "cmd": " ^\r\n  ", "ps": " `\r\n  "}

# A script without a fault, and the same without the guards.
GOOD = """#!/bin/bash
export PYTHONPATH=/hangproof
accelerate launch --num_processes 1 -m sd_scripts_patches /sd/flux_train_network.py \\
  --max_data_loader_n_workers 2 --persistent_data_loader_workers \\
  --save_state --save_every_n_epochs 4 --save_last_n_epochs_state 2 \\
  --cache_latents --cache_latents_to_disk --cache_text_encoder_outputs --cache_text_encoder_outputs_to_disk \\
  --network_args "train_blocks=single" --output_dir /out --output_name x
"""
UNGUARDED = GOOD.replace("-m sd_scripts_patches ", "")


@dataclass
class Started:
    """A program that a script started."""

    program: str
    python_path: str
    words: list[str]


def stand_ins(folder: Path, names: Sequence[str] = PROGRAMS) -> Path:
    for name in names:
        executable(folder / name, STAND_IN)
    return folder


def run(script: Path, programs: Path) -> tuple[int, list[Started]]:
    """Run a script in its own folder; its exit code and the programs that it started, in order."""
    if script.suffix == ".bat":  # cmd is not here
        return 0, [Started(words[0], "", words[1:]) for words in parsed(script.read_bytes().decode(), script.name)]
    record = programs / f"record-{os.getpid()}"
    record.unlink(missing_ok=True)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "RECORD": str(record), "HOME": "/home/me", "USER": "me"}
    command = ["bash", script.name]
    done = subprocess.run(command, cwd=script.parent, capture_output=True, timeout=300, env=environment, check=False)
    raw = record.read_bytes().decode("utf-8", "surrogateescape").split("\0") if record.exists() else []
    out, at = [], 0
    while at + 2 < len(raw):
        count = int(raw[at])
        out.append(Started(raw[at + 1], raw[at + 2], raw[at + 3 : at + 3 + count]))
        at += 3 + count
    return done.returncode, out


def parsed(text: str, name: str) -> list[list[str]]:
    """The words of each training command; a NUL stands for what only the interpreter knows."""
    return [[word.shape for word in t.command.words] for t in trainings(text, name)]


def lint(path: Path, *options: str) -> tuple[int, str, dict]:
    """`presets lint PATH --json OPTIONS`: its exit code, what it printed, and the JSON."""
    done = call("presets", "lint", path, "--json", *options)
    value = json.loads(done.stdout.splitlines()[-1]) if done.stdout.endswith("}\n") else {}
    return done.returncode, done.stdout + done.stderr, value


def script_of(words: Sequence[str]) -> int | None:
    """The index of the training script."""
    return next((i for i, w in enumerate(words) if file_name(w.strip('"')) in SCRIPTS), None)


def announced(started: Started, changes: list[dict]) -> Started:
    """What must be started after these changes; `changes` is from lint's JSON."""
    program, path, words = started.program, started.python_path, list(started.words)
    for change in changes:
        script = script_of(words)
        if change["kind"] == "Guard":
            if program in SCRIPTS:
                program, words = "python", ["-m", "sd_scripts_patches", f"./{program}", *words]
            else:
                assert script is not None
                words[script:script] = ["-m", "sd_scripts_patches"]
            path = f"{ROOT}:{path}" if path else str(ROOT)
        elif change["kind"] in ("Drop", "Set"):
            words = _set(words, change["flag"], change["values"] if change["kind"] == "Set" else None)
        else:
            assert change["kind"] in ("Newlines", "Unmark"), "for the whole script: see `hold`"
    return Started(program, path, words)


def _set(words: list[str], flag: str, values: list[str] | None) -> list[str]:
    """Replace the last mention of a flag and remove the others; without one, add it at the end. None: remove all."""
    new = [] if values is None else [f"--{flag}", *values]
    first = (script_of(words) or 0) + 1
    found = [i for i, word in enumerate(words) if i >= first and word.partition("=")[0] == f"--{flag}"]
    if not found:
        return words + new
    takes = [i + 1 for i in found if "=" not in words[i] and flag not in SWITCHES]
    gone = {*found, *(i for i in takes if i < len(words) and not re.match("--[A-Za-z]", words[i]))}
    return [one for i, word in enumerate(words) for one in (new if i == found[-1] else [] if i in gone else [word])]


def hold(folder: Path, programs: Path, text: str, name: str = "train.sh") -> dict:
    """Fix a script and check that it starts the same programs, apart from the changes that lint reports.

    Returns:
        lint's JSON of the fix, with `started` (what the fixed script starts) and `text` (the fixed script).
    """
    path = folder / name
    stand_ins(folder, PROGRAMS[-1:])
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    first_code, _, first = lint(path)
    code, printed, value = lint(path, "--fix")
    assert "findings" in value, printed
    fixed = path.read_bytes().decode("utf-8", "surrogateescape")

    assert code == (1 if value["findings"] else 0) and value["clean"] == (not value["findings"])
    assert ("no problems found" in printed) == value["clean"]
    for change in value["changes"]:
        assert change["text"] in printed and change["rule"] in printed
    for finding in value["findings"]:
        assert f"{finding['id']} ({finding['level']})" in printed and not finding["fixable"]
    assert bool(value["changes"]) == (fixed != text), "every change is reported, and only changes are"
    left = {finding["id"] for finding in value["findings"]}
    assert set(value["fixed"]) == {finding["id"] for finding in first["findings"]} - left
    assert first_code == (1 if first["findings"] else 0)

    again_code, _, again = lint(path, "--fix")
    assert path.read_bytes().decode("utf-8", "surrogateescape") == fixed, "a second fix changes nothing"
    assert again_code == code and again["findings"] == value["findings"] and not again["changes"]

    kinds = {change["kind"] for change in value["changes"]}
    plain = text.replace("\r\n", "\n") if "Newlines" in kinds else text
    path.write_bytes((plain.removeprefix("\ufeff") if "Unmark" in kinds else plain).encode("utf-8", "surrogateescape"))
    exit_before, before = run(path, programs)
    path.write_bytes(fixed.encode("utf-8", "surrogateescape"))
    exit_after, after = run(path, programs)
    count = len(trainings(text, name, folder))
    expected, number = [], 0
    for started in before:
        script = script_of(started.words)
        other = script and ("py_compile" in started.words or "tool.py" in started.words[:script])
        trains = started.program in SCRIPTS or (script is not None and not other)
        number = min(number + trains, count)  # a command in a loop is started several times
        expected.append(announced(started, [c for c in value["changes"] if trains and c["command"] == number]))
        if path.suffix == ".bat":
            expected[-1].python_path = ""  # the parser does not say it
    assert after == expected and exit_after == exit_before
    return value | {"started": after, "text": fixed}


FLUXGYM = CORPUS["fluxgym"]["tiers"]


def fluxgym(tier: str, samples: bool = False, advanced: Sequence[str] = (), windows: bool = False) -> str:
    """A script as FluxGym's gen_sh writes it: it ends with a line continuation unless advanced flags were set."""
    mark, root = ("^", "C:\\my gym") if windows else ("\\", "/my gym")
    written = CORPUS["fluxgym"]
    lines = [f"accelerate launch {mark}", *(f"  {flag} {mark}" for flag in [*written["first"], *FLUXGYM[tier]])]
    if samples:  # gen_sh puts these right after the continuation of the line before
        lines[-1] += f'--sample_prompts="ROOT/p.txt" --sample_every_n_steps="100" {mark}'
    lines += [f"  {flag} {mark}" for flag in [*written["last"], *advanced[:-1]]]
    lines += [f"  {flag}" for flag in advanced[-1:]]
    return ("\r\n" if windows else "\n").join(lines).replace("ROOT", root)


def corpus_text(entry: dict, last: str = "\n") -> str:
    """A script with a command of the corpus, in its layout."""
    words, language = entry["words"], entry["language"]
    groups: list[list[str]] = [[]]
    script = script_of(words) or 0
    for i, word in enumerate(words):
        if word.startswith("-") and i > script:
            groups.append([])
        groups[-1].append(word)
    between = {"continued": NEXT_LINE[language], "not continued": " \n    ", "one line": " "}[entry["layout"]]
    return between.join(" ".join(group) for group in groups) + last


def plus(more: str, script: str = GOOD) -> str:
    """A script with more flags at the end of its command."""
    return script.rstrip("\n") + f" {more}\n"
