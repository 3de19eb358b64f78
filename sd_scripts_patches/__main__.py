"""`python -m sd_scripts_patches SCRIPT ARGS` · `… -m MODULE ARGS` · `… check DIR [--json]`.

`train.sh` uses the first form in place of `python SCRIPT ARGS`. Our own flags (`--hangproof_…`, see timeouts.py) may
appear anywhere among ARGS. Exit code: the script's own; 1 when a patch is incompatible, before anything is loaded;
2 for wrong usage.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

from guards import gate, machine
from sd_scripts_patches import (
    compatibility,
    exit as exit_patch,
    hooks,
    registry,
    runner,
    session,
    timeouts,
    versions,
)
from sd_scripts_patches.patch import Incompatible

CACHES = re.compile(r"_cache_(latents|text_encoder_outputs)\.py$")  # musubi-tuner's, which run before the training
USAGE = """usage: python -m sd_scripts_patches [--hangproof_…] SCRIPT ARGS     run a script of sd-scripts or musubi-tuner with the guards
       python -m sd_scripts_patches [--hangproof_…] -m MODULE ARGS   run a module with the guards
       python -m sd_scripts_patches check DIR [--json]               check which patches are compatible with a checkout

time limits in seconds (0: none) and settings; each can also be set as HANGPROOF_… in the environment:
"""


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code. After a script has run, the process exits here."""
    try:
        arguments = timeouts.take_flags(arguments)
        registry.patches()
    except timeouts.UsageError as error:
        print(f"sd_scripts_patches: {error}", file=sys.stderr)
        return 2
    if not arguments or arguments[arguments[0] == "check" :][:1] in (["-h"], ["--help"]):
        print(USAGE + timeouts.listing(), end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "check":
        return check(arguments[1:])
    as_module = arguments[0] == "-m"
    if as_module and len(arguments) < 2:
        print(USAGE + timeouts.listing(), end="", file=sys.stderr)
        return 2
    if not as_module and not Path(arguments[0]).is_file():
        print(f"sd_scripts_patches: {arguments[0]}: script not found", file=sys.stderr)
        return 2

    folder = Path.cwd() if as_module else Path(arguments[0]).resolve().parent
    checkout = compatibility.find_checkout(folder)
    patches = registry.patches(checkout.trainer if checkout else compatibility.SD_SCRIPTS)
    source = checkout.source if checkout else None
    if source is None:
        session.log(f"{folder} is not an sd-scripts checkout: only installed packages are guarded")
    else:
        os.environ[hooks.CHECKOUT_VARIABLE] = str(source)
        refusal, spared = compatibility.refusal(patches, source, arguments, timeouts.setting("strict") == "1")
        if refusal:
            print(refusal, file=sys.stderr)
            return 1
        for line in spared:
            session.log(f"not guarded, and not used by this run: {line}")
        assert checkout is not None
    if gate.closed() and CACHES.search(Path(arguments[0]).name):
        return 0  # a standby: the attempt that trains has finished the caches
    if limited := machine.avoid_amx():
        session.log(limited)
    outcome, note = "failed", ""

    def begin() -> None:
        """What touches the run's folder: the record of this process and the commit that it trains with."""
        sys.argv[1:] = gate.wait(sys.argv[1:])
        session.start()
        if checkout is not None and (other := versions.on_start(checkout)):
            session.log(other)

    if gate.closed():
        runner.before_main = begin  # after the script's imports
    else:
        begin()
    try:
        for patch in patches:
            if patch.prepare is not None:
                patch.prepare(False)
        hooks.install(patches, source)
        runner.patch_spawned_workers()
        if as_module:
            runner.run_module(arguments[1], arguments[2:], source)
        else:
            runner.run_script(Path(arguments[0]), arguments[1:], source)
    except Incompatible as error:
        note = f"incompatible with this {checkout.trainer if checkout else 'script'}: {error}"
        session.log(f"{note}. Nothing was trained.")
        code = 1
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        outcome, note = ("failed", f"exit code {code}") if code else ("done", "")
    except BaseException as error:  # noqa: BLE001 - top of the process: every error of the script ends here
        code, note = exit_patch.report_error(error)
    else:
        code, outcome = 0, "done"
    if not any(patch.name == "exit" for patch in patches):
        session.heartbeat().end(outcome, note)
        return code
    return exit_patch.exit_process(code, outcome, note)


def check(arguments: list[str]) -> int:
    """Print what is guarded in a checkout; return 1 when something is not."""
    folders = [a for a in arguments if a != "--json"]
    if len(folders) != 1 or folders[0].startswith("-"):
        print(USAGE + timeouts.listing(), end="", file=sys.stderr)
        return 2
    folder = Path(folders[0]).resolve()
    checkout = compatibility.find_checkout(folder)
    if checkout is None:
        sd_scripts, musubi = (" and ".join(names) for names in compatibility.MARKERS.values())
        print(
            f"sd_scripts_patches: {folder} is not an sd-scripts checkout: it needs {sd_scripts}; "
            f"nor one of musubi-tuner: src/ needs {musubi}. An older version lacks some of them: update it",
            file=sys.stderr,
        )
        return 1
    findings = [compatibility.check_patch(patch, checkout.source) for patch in registry.patches(checkout.trainer)]
    broken = [finding.patch for finding in findings if finding.open]
    targets = [target.verdict for finding in findings for target in finding.targets]
    counts = {verdict: targets.count(verdict) for verdict in compatibility.VERDICTS}
    if "--json" in arguments:
        rows = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"checkout": str(folder), "ok": not broken, "counts": counts, "patches": rows}))
    else:
        print(compatibility.format_table(findings))
        shown = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        print(f"\n{len(findings)} patches checked with {folder}: {shown}")
    if broken:
        print(f"sd_scripts_patches: not guarded: {', '.join(broken)}; see the table", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
