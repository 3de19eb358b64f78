"""`train.sh` and `train.bat`: a plain script that a person can read, change and run, one flag a line.

It trains with or without our monitor; nothing in it is hidden. Where the values come from is runs/command.py, how they
are quoted is runs/quoting.py.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import presets
from runs.command import environment, flags, launch, launcher, words
from runs.files import RunError
from runs.paths import ROOT
from runs.quoting import quote, quote_cmd

if TYPE_CHECKING:
    from runs.spec import RunSpec

MISSING = "no accelerate for the {backend} backend at {path}, nor on PATH; {cure}"
CURE = {"diffusers": "run ./start.sh once", "sd-scripts": "run ./start.sh sd-scripts"}


def script_name(attempt: int = 1, platform: str = sys.platform) -> str:
    """The script's file name; the first attempt's is the one a person starts."""
    suffix = "bat" if platform.startswith("win") else "sh"
    return f"train.{suffix}" if attempt == 1 else f"train.attempt-{attempt}.{suffix}"


def script(spec: "RunSpec", folder: Path, resume: Path | None = None, platform: str = sys.platform) -> str:
    """The whole script.

    Raises:
        RunError: a value cannot be written in the platform's script; or samples are asked for without a prompt.
    """
    lines = [*launch(spec), *words(flags(spec, folder, resume, platform))]
    return (_batch if platform.startswith("win") else _bash)(spec, lines, platform, folder)


def _title(spec: "RunSpec") -> str:
    backend = {"diffusers": "the embedded trainer", "sd-scripts": "kohya's sd-scripts"}[spec.backend]
    return f"Trains {spec.slug}: a LoRA of {presets.models()[spec.model]['name']}, tier {spec.tier}, with {backend}."


def _missing(spec: "RunSpec", path: Path) -> str:
    return MISSING.format(backend=spec.backend, path=path, cure=CURE[spec.backend])


def _bash(spec: "RunSpec", lines: list[list[str]], platform: str, folder: Path) -> str:
    program = launcher(spec, platform)
    exports = "".join(f"export {name}={quote(value)}\n" for name, value in environment(spec, platform).items())
    command = " \\\n  ".join(" ".join(map(quote, line)) for line in lines)
    aside, start = "", "exec "
    if spec.save_dir:
        # a trap keeps the exit code, and needs the shell to stay: no exec
        local, final = quote(spec.save_dir), quote(str(folder))
        aside = f"mkdir -p -- {local}\ntrap {quote(f'cp -R -- {local}/. {final}/')} EXIT\n"
        start = ""
    return f"""#!/usr/bin/env bash
# {" ".join(_title(spec).split())}
# Written from run.toml. By itself: bash train.sh · watched, and brought back when it hangs: python -m monitor run {spec.slug}
set -eu
cd {quote(str(ROOT))}
export PYTHONPATH={quote(str(ROOT))}"${{PYTHONPATH:+:$PYTHONPATH}}"
{exports}
launcher=${{ACCELERATE:-}}
if [ -z "$launcher" ] && [ -x {quote(str(program))} ]; then launcher={quote(str(program))}; fi
if [ -z "$launcher" ]; then
  launcher=$(command -v accelerate) || {{ echo {quote(_missing(spec, program))} >&2; exit 127; }}
fi
{aside}
{start}"$launcher" {command}
"""


def _in_quotes(value: str) -> str:
    """A value for cmd's own commands (`cd`, `set`, `if exist`), which do not take carets between quotes."""
    if any(c in value for c in '"\0\r\n\x1a'):
        raise RunError(
            f"a batch file cannot hold this path: {value!r}; move the folder to one without these characters"
        )
    return value.replace("%", "%%")


def _batch(spec: "RunSpec", lines: list[list[str]], platform: str, folder: Path) -> str:
    program, root = _in_quotes(str(launcher(spec, platform))), _in_quotes(str(ROOT))
    exports = "".join(f'set "{name}={_in_quotes(value)}"\n' for name, value in environment(spec, platform).items())
    command = " ^\n  ".join(" ".join(map(quote_cmd, line)) for line in lines)
    before, after = "", "exit /b %ERRORLEVEL%\n"
    if spec.save_dir:
        local, final = _in_quotes(spec.save_dir), _in_quotes(str(folder))
        before = f'if not exist "{local}" mkdir "{local}"\n'
        after = f'set "code=%ERRORLEVEL%"\nxcopy /e /i /y /q "{local}" "{final}" >nul\nexit /b %code%\n'
    text = f"""@echo off
rem {" ".join(_title(spec).split()).translate(str.maketrans("", "", "%^&|<>"))}
rem Written from run.toml. By itself: train.bat - watched, and brought back when it hangs: python -m monitor run {spec.slug}
chcp 65001 >nul
setlocal DisableDelayedExpansion
cd /d "{root}" || exit /b 1
if defined PYTHONPATH (set "PYTHONPATH={root};%PYTHONPATH%") else (set "PYTHONPATH={root}")
{exports}
set "launcher=%ACCELERATE%"
if not defined launcher if exist "{program}" set "launcher={program}"
if not defined launcher for %%P in (accelerate.exe) do set "launcher=%%~$PATH:P"
if not defined launcher (echo {quote_cmd(_missing(spec, launcher(spec, platform)))} 1>&2 & exit /b 127)

{before}"%launcher%" {command}
{after}"""
    return text.replace("\n", "\r\n")
