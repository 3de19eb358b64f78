"""`train.sh` and `train.bat`: plain scripts that a person can read, change and run, with one flag per line.

A script trains with or without the monitor. It is a rendering of a Job (runs/job.py); runs/quoting.py quotes the values. One
process is started directly, several by `accelerate launch`. Where caches are made by commands of their own, these run first with the
same interpreter: the first that fails ends the script with its exit code, and the next start runs all of them again, which
keep what is finished.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from runs import custom_script, env_file
from runs.command import NODE_VARIABLES, launcher, module, trainer_python, words
from runs.files import RunError
from runs.job import Job, resolve
from runs.paths import CHECKOUTS, ROOT
from runs.quoting import Variable, quote, quote_cmd

if TYPE_CHECKING:
    from runs.spec import RunSpec

MISSING = "no accelerate for the {backend} backend: {path} does not exist and PATH has none; {install}"
NO_NODE = "{name} is not set: this run trains on {nodes} machines, and the variable holds {what}"
NO_PYTHON = "no python for the {backend} backend: {path} does not exist and PATH has none; {install}"
INSTALL = {"diffusers": "run ./start.sh once"} | {name: f"run ./start.sh {name}" for name in CHECKOUTS}
GUARDS = "sd_scripts_patches"


def script_name(attempt: int = 1, platform: str = sys.platform) -> str:
    """The file name of an attempt's script; the first is the one that a person starts."""
    suffix = "bat" if platform.startswith("win") else "sh"
    return f"train.{suffix}" if attempt == 1 else f"train.attempt-{attempt}.{suffix}"


def script(spec: "RunSpec", folder: Path, resume: Path | None = None, platform: str = sys.platform) -> str:
    """The text of the script of a spec, by the tables of this version.

    Args: as runs.command.arguments. Raises: as runs.job.resolve and `rendered`.
    """
    return rendered(resolve(spec, folder, platform), resume)


def rendered(job: Job, resume: Path | None = None) -> str:
    """The text of a job's script.

    Raises:
        RunError: the platform's script cannot hold a value, or several machines would train under Windows.
    """
    windows = job.platform.startswith("win")
    if job.nodes > 1 and windows:
        raise RunError("nodes: several machines train together under Linux only; set nodes to 1, or use WSL")
    *caching, training = job.commands
    options = [[Variable(word[1:]) if word.startswith("$") else word for word in line] for line in job.launch]
    flags = {**training["flags"], "resume": str(resume) if resume else False}
    lines = [*options, module(job.backend, training["script"]), *words(flags)]
    before = [(one["what"], [module(job.backend, one["script"]), *words(one["flags"])]) for one in caching]
    text = (_batch if windows else _bash)(job, before, lines)
    if "edited" not in job.spec:
        return text
    return env_file.with_lines(custom_script.render(job.spec["edited"], job.slug, text, job.platform), _secrets(job))


def _secrets(job: Job) -> str:
    """The lines that read the values of secrets; "" for a run without any."""
    lines = env_file.batch_lines if job.platform.startswith("win") else env_file.bash_lines
    return lines(job.spec.get("secrets", []), Path(job.places["run"]))


def _title(job: Job) -> str:
    return " ".join(f"Trains {job.slug}: {job.title}.".split())


def _unguarded(lines: list[list[str]]) -> str:
    """The comment on the guards: what they do, and the command without them; "" for the built-in trainer."""
    words = [word for line in lines for word in line]
    if GUARDS not in words:
        return ""
    script = " ".join(words[words.index(GUARDS) + 1].split())
    return f"-m {GUARDS} adds a limit to every wait. Without it: accelerate launch {script} and the flags below"


def _together(job: Job) -> str:
    """The comment of a run with several processes; "" for one."""
    if job.world == 1:
        return ""
    machines = f" on {job.nodes} machines" if job.nodes > 1 else ""
    return (
        f"{job.world} processes train together{machines}: each on a GPU of its own (NCCL), or on the processor (gloo) "
        "where PyTorch finds no GPU."
    )


def _bash_nodes(job: Job) -> str:
    """The check of the variables that tell several machines apart; "" for one machine."""
    if job.nodes == 1:
        return ""
    return "".join(
        f'[ -n "${{{name}:-}}" ] || {{ echo {quote(NO_NODE.format(name=name, nodes=job.nodes, what=what))} >&2; exit 2; }}\n'
        for name, what in NODE_VARIABLES.items()
    )


def _missing(job: Job, path: Path, text: str = MISSING) -> str:
    return text.format(backend=job.backend, path=path, install=INSTALL[job.backend])


Before = list[tuple[str, list[list[str]]]]  # the caching commands: what each does, its words by flag


def _bash_python(job: Job) -> str:
    """The lines that find the interpreter: $TRAINER_PYTHON, the one beside the launcher, the environment's, that on the PATH."""
    python = trainer_python(job.backend, job.platform)
    beside = '[ -n "${ACCELERATE:-}" ]; then python=$(dirname -- "$(command -v -- "$ACCELERATE")")/python; fi'
    if not job.direct:
        beside = '[ -x "${launcher%/*}/python" ]; then python=${launcher%/*}/python; fi'
    return f"""
python=${{TRAINER_PYTHON:-}}
if [ -z "$python" ] && {beside}
if [ -z "$python" ] && [ -x {quote(str(python))} ]; then python={quote(str(python))}; fi
if [ -z "$python" ]; then
  python=$(command -v python3) || {{ echo {quote(_missing(job, python, NO_PYTHON))} >&2; exit 127; }}
fi
"""


def _bash_launcher(job: Job) -> str:
    """The lines that find the launcher: $ACCELERATE, the environment's, that on the PATH."""
    program = launcher(job.backend, job.platform)
    return f"""
launcher=${{ACCELERATE:-}}
if [ -z "$launcher" ] && [ -x {quote(str(program))} ]; then launcher={quote(str(program))}; fi
if [ -z "$launcher" ]; then
  launcher=$(command -v accelerate) || {{ echo {quote(_missing(job, program))} >&2; exit 127; }}
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


def _bash(job: Job, before: Before, lines: list[list[str]]) -> str:
    programs = "" if job.direct else _bash_launcher(job)
    programs += _bash_python(job) if job.direct or before else ""
    program = "$python" if job.direct else "$launcher"
    exports = "".join(f"export {name}={quote(value)}\n" for name, value in job.environment.items())
    command = " \\\n  ".join(" ".join(map(quote, line)) for line in lines)
    comments = "".join(f"# {text}\n" for text in (_unguarded(lines), _together(job)) if text)
    aside, start = "", "exec "
    if job.save_dir:
        aside = _copy_at_exit(job.save_dir, job.places["run"])
        start = ""  # exec would replace the shell, and its trap would never run
    return f"""#!/usr/bin/env bash
# {_title(job)}
# Written from run.toml. Run it without the monitor: bash train.sh
# Run it with the monitor, which restarts it after a hang: python -m monitor run {job.slug}
{comments}set -eu
cd {quote(str(ROOT))}
export PYTHONPATH={quote(str(ROOT))}"${{PYTHONPATH:+:$PYTHONPATH}}"
{exports}{_secrets(job)}{_bash_nodes(job)}{programs}{aside}{_bash_caching(before)}
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


def _batch_python(job: Job) -> str:
    """As _bash_python, for cmd."""
    python = _in_quotes(str(trainer_python(job.backend, job.platform)))
    beside = 'if not defined python if defined ACCELERATE for %%L in ("%ACCELERATE%") do set "python=%%~dpLpython.exe"'
    if not job.direct:
        beside = 'if not defined python for %%L in ("%launcher%") do if exist "%%~dpLpython.exe" set "python=%%~dpLpython.exe"'
    return f"""
set "python=%TRAINER_PYTHON%"
{beside}
if not defined python if exist "{python}" set "python={python}"
if not defined python for %%P in (python.exe) do set "python=%%~$PATH:P"
if not defined python (echo {quote_cmd(_missing(job, trainer_python(job.backend, job.platform), NO_PYTHON))} 1>&2 & exit /b 127)
"""


def _batch_launcher(job: Job) -> str:
    """As _bash_launcher, for cmd."""
    program = _in_quotes(str(launcher(job.backend, job.platform)))
    return f"""
set "launcher=%ACCELERATE%"
if not defined launcher if exist "{program}" set "launcher={program}"
if not defined launcher for %%P in (accelerate.exe) do set "launcher=%%~$PATH:P"
if not defined launcher (echo {quote_cmd(_missing(job, launcher(job.backend, job.platform)))} 1>&2 & exit /b 127)
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


def _batch(job: Job, before: Before, lines: list[list[str]]) -> str:
    root, program = _in_quotes(str(ROOT)), "%python%" if job.direct else "%launcher%"
    programs = "" if job.direct else _batch_launcher(job)
    programs += _batch_python(job) if job.direct or before else ""
    exports = "".join(f'set "{name}={_in_quotes(value)}"\n' for name, value in job.environment.items())
    command = " ^\n  ".join(" ".join(map(quote_cmd, line)) for line in lines)
    plain = str.maketrans("", "", "%^&|<>")
    comments = "".join(f"rem {text.translate(plain)}\n" for text in (_unguarded(lines), _together(job)) if text)
    make_local, after = "", "exit /b %ERRORLEVEL%\n"
    if job.save_dir:
        local, final = (_in_quotes(path.replace("/", "\\")) for path in (job.save_dir, job.places["run"]))
        make_local = f'if not exist "{local}" mkdir "{local}"\n'
        failed = quote_cmd(_not_copied(job.save_dir, job.places["run"]))
        after = COPY_AFTER.format(local=local, final=final, failed=failed)
    text = f"""@echo off
rem {_title(job).translate(plain)}
rem Written from run.toml. Run it without the monitor: train.bat
rem Run it with the monitor, which restarts it after a hang: python -m monitor run {job.slug}
{comments}chcp 65001 >nul
setlocal DisableDelayedExpansion
cd /d "{root}" || exit /b 1
if defined PYTHONPATH (set "PYTHONPATH={root};%PYTHONPATH%") else (set "PYTHONPATH={root}")
{exports}{_secrets(job)}{programs}{_batch_caching(before)}
{make_local}"{program}" {command}
{after}"""
    return text.replace("\n", "\r\n")
