"""`python -m sd_scripts_patches SCRIPT ARGS` · `… -m MODULE ARGS` · `… check DIR [--json]`.

The first is the line that `train.sh` has in place of `python SCRIPT ARGS`; our own flags (`--hangproof_…`, see
timeouts.py) may stand anywhere among ARGS. Exit code: the script's own; 1 where a patch does not fit, before
anything is loaded; 2 for wrong usage.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sd_scripts_patches import exit as leaving
from sd_scripts_patches import fits, hooks, registry, runner, session, timeouts
from sd_scripts_patches.patch import DoesNotFit

USAGE = """usage: python -m sd_scripts_patches [--hangproof_…] SCRIPT ARGS   run a script of sd-scripts, guarded
       python -m sd_scripts_patches [--hangproof_…] -m MODULE ARGS   run a module in the same way
       python -m sd_scripts_patches check DIR [--json]             which patches fit this checkout

deadlines in seconds (0: none) and settings, each also as HANGPROOF_… in the environment:
"""


def main(arguments: list[str]) -> int:
    """Returns an exit code, or does not return: a script that has run leaves by itself."""
    try:
        arguments = timeouts.take_flags(arguments)
        patches = registry.patches()
    except timeouts.UsageError as error:
        print(f"sd_scripts_patches: {error}", file=sys.stderr)
        return 2
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE + timeouts.listing(), end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "check":
        return check(arguments[1:])
    as_module = arguments[0] == "-m"
    if as_module and len(arguments) < 2:
        print(USAGE + timeouts.listing(), end="", file=sys.stderr)
        return 2
    if not as_module and not Path(arguments[0]).is_file():
        print(f"sd_scripts_patches: {arguments[0]}: no such script", file=sys.stderr)
        return 2

    checkout = Path.cwd() if as_module else Path(arguments[0]).resolve().parent
    refusal = refuse(checkout)
    if refusal:
        print(refusal, file=sys.stderr)
        return 1
    session.start()
    try:
        for patch in patches:
            if patch.prepare is not None:
                patch.prepare(False)
        hooks.install(patches)
        runner.guard_spawned_workers()
        if as_module:
            runner.run_module(arguments[1], arguments[2:])
        else:
            runner.run_script(Path(arguments[0]), arguments[1:])
    except DoesNotFit as error:
        session.say(f"does not fit: {error}. Nothing was trained.")
        code = 1
        session.heartbeat().end("failed", f"does not fit: {error}")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        session.heartbeat().end("failed" if code else "done", f"exit code {code}" if code else "")
    except BaseException as error:  # noqa: BLE001 - the top of the process: whatever ends the script ends here
        code = leaving.failed(error)
    else:
        code = 0
        session.heartbeat().end("done")
    if not any(patch.name == "exit" for patch in patches):
        return code
    return leaving.leave_with(code)


def check(arguments: list[str]) -> int:
    """Print the table; 1 where a patch that the presets rely on does not fit."""
    folders = [a for a in arguments if a != "--json"]
    if len(folders) != 1 or folders[0].startswith("-"):
        print(USAGE + timeouts.listing(), end="", file=sys.stderr)
        return 2
    folder = Path(folders[0]).resolve()
    if not fits.is_checkout(folder):
        print(
            f"sd_scripts_patches: {folder}: no sd-scripts checkout (looked for {', '.join(fits.MARKS)})",
            file=sys.stderr,
        )
        return 1
    findings = [fits.judge(patch, folder) for patch in registry.patches()]
    broken = [f.patch for f in findings if f.verdict == fits.UNFIT and f.relied_on]
    if "--json" in arguments:
        print(json.dumps({"checkout": str(folder), "ok": not broken, "patches": fits.as_json(findings)}))
    else:
        print(fits.table(findings))
    if broken:
        print(f"sd_scripts_patches: does not fit: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


def refuse(checkout: Path) -> str:
    """Why the script may not run against this checkout: the table of what does not fit; "" where all fits."""
    here = checkout if fits.is_checkout(checkout) else None
    if here is None:
        print(f"hangproof: {checkout} is no sd-scripts checkout: only installed packages are guarded", file=sys.stderr)
        return ""
    findings = [fits.judge(patch, here) for patch in registry.patches()]
    broken = [f for f in findings if f.verdict == fits.UNFIT]
    if not broken:
        return ""
    return (
        f"{fits.table(findings)}\nhangproof: {', '.join(f.patch for f in broken)} does not fit {checkout}; nothing was loaded. "
        "Use the pinned sd-scripts, or leave it out on your own risk with --hangproof_without=NAME."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
