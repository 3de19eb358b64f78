"""`train.sh` and `train.bat`: plain scripts that a person can read, change and run, with one flag per line.

A script trains with or without the monitor. runs/command.py determines the values, runs/quoting.py quotes them. One process
is started directly, several by `accelerate launch`. Where caches are made by commands of their own, these run first with the
same interpreter: the first that fails ends the script with its exit code, and the next start runs all of them again, which
keep what is finished.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import presets
from runs import custom_script, env_file
from runs.command import (
    NODE_VARIABLES,
    caching,
    direct,
    environment,
    flags,
    launch,
    launcher,
    trainer_python,
    words,
    world,
)
from runs.files import RunError
from runs.paths import CHECKOUTS, ROOT
from runs.quoting import quote, quote_cmd

if TYPE_CHECKING:
    from runs.spec import RunSpec

MISSING = "no accelerate for the {backend} backend: {path} does not exist and PATH has none; {install}"
NO_NODE = "{name} is not set: this run trains on {nodes} machines, and the variable holds {what}"
NO_PYTHON = "no python for the {backend} backend: {path} does not exist and PATH has none; {install}"
INSTALL = {"diffusers": "run ./start.sh once"} | {name: f"run ./start.sh {name}" for name in CHECKOUTS}


def script_name(attempt: int = 1, platform: str = sys.platform) -> str:
    """The file name of an attempt's script; the first is the one that a person starts."""
    suffix = "bat" if platform.startswith("win") else "sh"
    return f"train.{suffix}" if attempt == 1 else f"train.attempt-{attempt}.{suffix}"


def script(spec: "RunSpec", folder: Path, resume: Path | None = None, platform: str = sys.platform) -> str:
    """The text of the script.

    Args: as runs.command.arguments.

    Raises:
        RunError: the platform's script cannot hold a value, samples are turned on without a prompt, or several machines
            would train under Windows.
    """
    if spec.nodes > 1 and platform.startswith("win"):
        raise RunError("nodes: several machines train together under Linux only; set nodes to 1, or use WSL")
    lines = [*launch(spec), *words(flags(spec, folder, resume, platform))]
    before = [(one.what, [_guarded(spec, one.script), *words(one.flags)]) for one in caching(spec, folder)]
    windows = platform.startswith("win")
    text = (_batch if windows else _bash)(spec, before, lines, platform, folder)
    if not spec.edited:
        return text
    secrets = (env_file.batch_lines if windows else env_file.bash_lines)(spec, folder)
    return env_file.with_lines(custom_script.render(spec, text, platform), secrets)


def _guarded(spec: "RunSpec", script: str) -> list[str]:
    """The words that start a caching script with the guards, after the interpreter."""
    return ["-m", "sd_scripts_patches", str(CHECKOUTS[spec.backend].script(script))]


def _title(spec: "RunSpec") -> str:
    backend = presets.backends()[spec.backend]["label"]
    return f"Trains {spec.slug}: a LoRA of {presets.models()[spec.model]['name']}, tier {spec.tier}, with {backend}."


def _together(spec: "RunSpec") -> str:
    """The comment of a run with several processes; "" for one."""
    if world(spec) == 1:
        return ""
    machines = f" on {spec.nodes} machines" if spec.nodes > 1 else ""
    return (
        f"{world(spec)} processes train together{machines}: each on a GPU of its own (NCCL), or on the processor (gloo) "
        "where PyTorch finds no GPU."
    )


def _bash_nodes(spec: "RunSpec") -> str:
    """The check of the variables that tell several machines apart; "" for one machine."""
    if spec.nodes == 1:
        return ""
    return "".join(
        f'[ -n "${{{name}:-}}" ] || {{ echo {quote(NO_NODE.format(name=name, nodes=spec.nodes, what=what))} >&2; exit 2; }}\n'
        for name, what in NODE_VARIABLES.items()
    )


def _missing(spec: "RunSpec", path: Path, text: str = MISSING) -> str:
    return text.format(backend=spec.backend, path=path, install=INSTALL[spec.backend])


Before = list[tuple[str, list[list[str]]]]  # the caching commands: what each does, its words by flag


def _bash_python(spec: "RunSpec", platform: str) -> str:
    """The lines that find the interpreter: $TRAINER_PYTHON, the one beside the launcher, the environment's, that on the PATH."""
    python = trainer_python(spec, platform)
    beside = '[ -n "${ACCELERATE:-}" ]; then python=$(dirname -- "$(command -v -- "$ACCELERATE")")/python; fi'
    if not direct(spec):
        beside = '[ -x "${launcher%/*}/python" ]; then python=${launcher%/*}/python; fi'
    return f"""
python=${{TRAINER_PYTHON:-}}
if [ -z "$python" ] && {beside}
if [ -z "$python" ] && [ -x {quote(str(python))} ]; then python={quote(str(python))}; fi
if [ -z "$python" ]; then
  python=$(command -v python3) || {{ echo {quote(_missing(spec, python, NO_PYTHON))} >&2; exit 127; }}
fi
"""


def _bash_launcher(spec: "RunSpec", platform: str) -> str:
    """The lines that find the launcher: $ACCELERATE, the environment's, that on the PATH."""
    program = launcher(spec, platform)
    return f"""
launcher=${{ACCELERATE:-}}
if [ -z "$launcher" ] && [ -x {quote(str(program))} ]; then launcher={quote(str(program))}; fi
if [ -z "$launcher" ]; then
  launcher=$(command -v accelerate) || {{ echo {quote(_missing(spec, program))} >&2; exit 127; }}
fi
"""


def _bash_caching(before: Before) -> str:
    """The caching commands; "" where there are none."""
    if not before:
        return ""
    lines = ""
    for what, words_of in before:
        command = " \\\n  ".join(" ".join(map(quote, line)) for line in words_of)
        lines += f'\n# {what}\n"$python" {command}\n'
    return f"{lines}\n# Trains."


def _bash(spec: "RunSpec", before: Before, lines: list[list[str]], platform: str, folder: Path) -> str:
    programs = "" if direct(spec) else _bash_launcher(spec, platform)
    programs += _bash_python(spec, platform) if direct(spec) or before else ""
    program = "$python" if direct(spec) else "$launcher"
    exports = "".join(f"export {name}={quote(value)}\n" for name, value in environment(spec, platform).items())
    command = " \\\n  ".join(" ".join(map(quote, line)) for line in lines)
    together = f"# {_together(spec)}\n" if _together(spec) else ""
    aside, start = "", "exec "
    if spec.save_dir:
        aside = _copy_at_exit(spec.save_dir, str(folder))
        start = ""  # exec would replace the shell, and its trap would never run
    return f"""#!/usr/bin/env bash
# {" ".join(_title(spec).split())}
# Written from run.toml. Run it without the monitor: bash train.sh
# Run it with the monitor, which restarts it after a hang: python -m monitor run {spec.slug}
{together}set -eu
cd {quote(str(ROOT))}
export PYTHONPATH={quote(str(ROOT))}"${{PYTHONPATH:+:$PYTHONPATH}}"
{exports}{env_file.bash_lines(spec, folder)}{_bash_nodes(spec)}{programs}{aside}{_bash_caching(before)}
{start}"{program}" {command}
"""


COPY_AT_EXIT = """# The trainer writes to a local folder. When this script ends, also after an error, the results are copied to the run's
# folder. Each is copied under a hidden name and renamed when it is complete: an interrupted copy leaves no truncated file.
(umask 077 && mkdir -p -- {local})
copy_into() {{
  local item name part old failed=0
  mkdir -p -- "$2" || return 1
  for item in "$1"/*; do
    [ -e "$item" ] || continue
    name=${{item##*/}}
    if [ -d "$item" ] && [ "$name" = "${{name%-state}}" ]; then
      copy_into "$item" "$2/$name" || failed=1
      continue
    fi
    part=$2/.$name.$$.tmp old=$2/.$name.$$.old
    rm -rf -- "$2/.$name".*.tmp
    if cp -R -- "$item" "$part" && {{ [ -d "$part" ] || sync -- "$part"; }} &&
      {{ [ ! -d "$2/$name" ] || mv -- "$2/$name" "$old"; }} && mv -- "$part" "$2/$name"; then
      rm -rf -- "$old"
    else
      failed=1
      rm -rf -- "$part"
      [ ! -d "$old" ] || [ -e "$2/$name" ] || mv -- "$old" "$2/$name"
    fi
  done
  return "$failed"
}}
copy_results() {{
  local code=$?
  copy_into {local} {final} && return
  echo {failed} >&2
  [ "$code" -ne 0 ] || exit 1
}}
trap copy_results EXIT
"""


def _copy_at_exit(local: str, final: str) -> str:
    """Shell code that copies the results from `local` to `final` at the end and keeps the trainer's exit code."""
    return COPY_AT_EXIT.format(local=quote(local), final=quote(final), failed=quote(_not_copied(local, final)))


def _not_copied(local: str, final: str) -> str:
    return (
        f"error: some results could not be copied from {local} to {final}; free some space there and copy them by hand"
    )


def _in_quotes(value: str) -> str:
    """A value for cmd's own commands (`cd`, `set`, `if exist`), which take carets literally between quotes."""
    if any(c in value for c in '"\0\r\n\x1a'):
        raise RunError(
            f"a batch file cannot hold the path {value!r}; move the folder to a path without quotes and control characters"
        )
    return value.replace("%", "%%")


# cmd has no trap: the copy runs when the trainer has ended. xcopy replaces other folders (samples) file by file.
COPY_AFTER = r"""set "code=%ERRORLEVEL%"
set "failed="
for %%F in ("{local}\*") do (copy /b /y "%%F" "{final}\.%%~nxF.tmp" >nul && move /y "{final}\.%%~nxF.tmp" "{final}\%%~nxF" >nul) || set "failed=1"
for /d %%D in ("{local}\*-state") do call :copy_state "%%~nxD" || set "failed=1"
for /d %%D in ("{local}\*") do (echo %%~nxD| findstr /e /c:"-state" >nul || xcopy /e /i /y /q "%%D" "{final}\%%~nxD" >nul) || set "failed=1"
if defined failed echo {failed} 1>&2
if defined failed if "%code%"=="0" exit /b 1
exit /b %code%

:copy_state
if exist "{final}\.%~1.tmp" rmdir /s /q "{final}\.%~1.tmp"
xcopy /e /i /y /q "{local}\%~1" "{final}\.%~1.tmp" >nul || exit /b 1
if exist "{final}\%~1" rmdir /s /q "{final}\%~1"
move "{final}\.%~1.tmp" "{final}\%~1" >nul
exit /b %ERRORLEVEL%
"""


def _batch_python(spec: "RunSpec", platform: str) -> str:
    """As _bash_python, for cmd."""
    python = _in_quotes(str(trainer_python(spec, platform)))
    beside = 'if not defined python if defined ACCELERATE for %%L in ("%ACCELERATE%") do set "python=%%~dpLpython.exe"'
    if not direct(spec):
        beside = 'if not defined python for %%L in ("%launcher%") do if exist "%%~dpLpython.exe" set "python=%%~dpLpython.exe"'
    return f"""
set "python=%TRAINER_PYTHON%"
{beside}
if not defined python if exist "{python}" set "python={python}"
if not defined python for %%P in (python.exe) do set "python=%%~$PATH:P"
if not defined python (echo {quote_cmd(_missing(spec, trainer_python(spec, platform), NO_PYTHON))} 1>&2 & exit /b 127)
"""


def _batch_launcher(spec: "RunSpec", platform: str) -> str:
    """As _bash_launcher, for cmd."""
    program = _in_quotes(str(launcher(spec, platform)))
    return f"""
set "launcher=%ACCELERATE%"
if not defined launcher if exist "{program}" set "launcher={program}"
if not defined launcher for %%P in (accelerate.exe) do set "launcher=%%~$PATH:P"
if not defined launcher (echo {quote_cmd(_missing(spec, launcher(spec, platform)))} 1>&2 & exit /b 127)
"""


def _batch_caching(before: Before) -> str:
    """As _bash_caching, for cmd."""
    if not before:
        return ""
    lines = ""
    for what, words_of in before:
        command = " ^\n  ".join(" ".join(map(quote_cmd, line)) for line in words_of)
        lines += f'\nrem {what}\n"%python%" {command}\nif not "%ERRORLEVEL%"=="0" exit /b %ERRORLEVEL%\n'
    return f"{lines}\nrem Trains."


def _batch(spec: "RunSpec", before: Before, lines: list[list[str]], platform: str, folder: Path) -> str:
    root, program = _in_quotes(str(ROOT)), "%python%" if direct(spec) else "%launcher%"
    programs = "" if direct(spec) else _batch_launcher(spec, platform)
    programs += _batch_python(spec, platform) if direct(spec) or before else ""
    exports = "".join(f'set "{name}={_in_quotes(value)}"\n' for name, value in environment(spec, platform).items())
    command = " ^\n  ".join(" ".join(map(quote_cmd, line)) for line in lines)
    together = f"rem {_together(spec)}\n" if _together(spec) else ""
    make_local, after = "", "exit /b %ERRORLEVEL%\n"
    if spec.save_dir:
        local, final = (_in_quotes(path.replace("/", "\\")) for path in (spec.save_dir, str(folder)))
        make_local = f'if not exist "{local}" mkdir "{local}"\n'
        failed = quote_cmd(_not_copied(spec.save_dir, str(folder)))
        after = COPY_AFTER.format(local=local, final=final, failed=failed)
    text = f"""@echo off
rem {" ".join(_title(spec).split()).translate(str.maketrans("", "", "%^&|<>"))}
rem Written from run.toml. Run it without the monitor: train.bat
rem Run it with the monitor, which restarts it after a hang: python -m monitor run {spec.slug}
{together}chcp 65001 >nul
setlocal DisableDelayedExpansion
cd /d "{root}" || exit /b 1
if defined PYTHONPATH (set "PYTHONPATH={root};%PYTHONPATH%") else (set "PYTHONPATH={root}")
{exports}{env_file.batch_lines(spec, folder)}{programs}{_batch_caching(before)}
{make_local}"{program}" {command}
{after}"""
    return text.replace("\n", "\r\n")
