"""`python -m monitor.render FOLDER --attempt N …`: write one attempt's script, or find the next mitigation.

A process of its own, because the spec needs pydantic (20 MB), which the watching process does without. Ends with one line of
JSON: with `--attempt` {"script", "save_dir", "fits"}, where `fits` tells whether a state that the attempt before saved can
be resumed after the changes; with `--next` {"name", "sentence"} of the first mitigation that changes anything, {} for none; with `--text` {"text", "save_dir"}; with `--problems` {"problems"}.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import runs
from presets import PresetError
from runs import mitigate

if TYPE_CHECKING:
    from runs import RunSpec


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 with the reason on standard error when the spec or a mitigation is wrong."""
    parser = argparse.ArgumentParser(prog="python -m monitor.render")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--change", action="append", default=[], help="a mitigation in force")
    parser.add_argument("--was", action="append", default=[], help="one in force when the states were saved")
    parser.add_argument("--problems", action="store_true", help="what stands in the way of a start")
    parser.add_argument("--text", action="store_true", help="the script's text, nothing is written")
    parser.add_argument("--next", nargs="*", default=None, metavar="MITIGATION")
    args = parser.parse_args(argv)
    try:
        original = runs.load(args.folder)
        spec = _changed(original, args.change)
        if args.next is not None:
            print(json.dumps(_first(spec, args.next)))
            return 0
        if args.problems:
            print(json.dumps({"problems": runs.problems(spec, ask=True)}))
            return 0
        if args.text:
            print(json.dumps({"text": runs.script(spec, args.folder, args.resume), "save_dir": spec.save_dir}))
            return 0
        fits = mitigate.same_state(_changed(original, args.was), spec)
        script = runs.write_attempt(args.folder, spec, args.attempt, args.resume if fits else None)
    except (runs.RunError, PresetError) as error:
        print(f"render: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"script": str(script), "save_dir": spec.save_dir, "fits": fits}))
    return 0


def _changed(spec: RunSpec, names: list[str]) -> RunSpec:
    for name in names:
        spec = mitigate.apply(spec, name)[0]
    return spec


def _first(spec: RunSpec, ladder: list[str]) -> dict[str, str]:
    for name in ladder:
        changed, sentence = mitigate.apply(spec, name)
        if changed != spec:
            return {"name": name, "sentence": sentence}
    return {}


if __name__ == "__main__":
    sys.exit(main())
