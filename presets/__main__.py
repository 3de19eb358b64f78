"""`python -m presets list|lint|estimate`: the tables; what in a script is known to hang; the memory of a spec."""

import argparse
import difflib
import json
import sys
from pathlib import Path

import presets


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m presets", description="Tiers, base models, and what is known to hang."
    )
    commands = top.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="tiers and base models")
    lint = commands.add_parser("lint", help="what in a training script is known to hang")
    lint.add_argument("script", help="a train.sh, .bat or any script that trains; - reads standard input")
    lint.add_argument(
        "--fix", action="store_true", help="rewrite the script so that it lints clean and trains the same"
    )
    estimate = commands.add_parser("estimate", help="GPU memory that a run needs, roughly")
    estimate.add_argument("run", help="a run's name or folder, or a run.toml")
    for command in (listing, lint, estimate):
        command.add_argument("--json", action="store_true", help="end with one line of JSON")
    return top


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 done (lint: clean), 1 failed or findings, 2 wrong usage."""
    args = parser().parse_args(argv)
    try:
        return {"list": show, "lint": lint, "estimate": estimate}[args.command](args)
    except presets.PresetError as error:
        print(f"presets: {error}", file=sys.stderr)
        return 1


def show(args: argparse.Namespace) -> int:
    """Print the tiers and the models."""
    tiers, models = presets.tiers(), presets.models()
    print("Tiers (--tier)")
    for name, tier in tiers.items():
        print(f"  {name:14} {tier['note']}")
    print("Base models (--model)")
    for key, model in models.items():
        print(f"  {key:14} {model['name']} · {model['licence']} · {', '.join(model['backends'])}")
    if args.json:
        print(json.dumps({"tiers": tiers, "all": presets.defaults()["all"], "models": models}, ensure_ascii=False))
    return 0


def lint(args: argparse.Namespace) -> int:
    """Print the findings of a script; with --fix, mend them and print what was changed."""
    from presets.lint import as_json
    from presets.lint import lint as find
    from presets.mend import mend
    from presets.training import trainings

    text, name, base, mounts = _source(args.script)
    if not trainings(text, name, base, mounts):
        raise presets.PresetError(
            f"{args.script}: no training command found; lint knows kohya's sd-scripts (flux_train_network.py …) and `-m trainer`"
        )
    mended = mend(text, name, base, mounts) if args.fix else None
    now = mended.text if mended else text
    findings = find(now, name, base, mounts)
    if mended and args.script == "-":
        print(now, end="")
    elif mended and now != text:
        _replace(Path(args.script), now)
        sys.stdout.writelines(
            line if line.endswith("\n") else f"{line}\n"
            for line in difflib.unified_diff(text.splitlines(True), now.splitlines(True), name, f"{name} (mended)")
        )
    for finding in findings:
        print(f"{args.script}:{finding.line}: {finding.id} ({finding.level}): {finding.why}")
        print(f"    {finding.mend}")
    if not findings and args.script != "-":
        print(f"{args.script}: clean")
    if args.json:
        result = {"clean": not findings, "findings": as_json(findings), "mended": mended.mended if mended else []}
        print(json.dumps(result, ensure_ascii=False))
    return 1 if findings else 0


def _source(script: str) -> tuple[str, str, Path, str]:
    """The script's text, its name, the folder that its relative paths start from, and what is mounted here."""
    mounts = Path("/proc/mounts")
    table = mounts.read_text(encoding="utf-8", errors="replace") if mounts.is_file() else ""
    if script == "-":
        return sys.stdin.read(), "train.sh", Path.cwd(), table
    path = Path(script)
    try:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise presets.PresetError(f"{script}: {error.strerror}; name a script that exists") from error
    return text, path.name, path.absolute().parent, table


def _replace(path: Path, text: str) -> None:
    """Write the mended script in place of the old one, whole or not at all, with its permissions."""
    import os
    import shutil

    new = path.with_name(f".{path.name}.mended")
    try:
        new.write_bytes(text.encode("utf-8", "surrogateescape"))
        shutil.copymode(path, new)
        os.replace(new, path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise presets.PresetError(f"{path}: cannot be rewritten ({error.strerror}); it is as it was") from error


def estimate(args: argparse.Namespace) -> int:
    """Print the estimate of a run's GPU memory."""
    from presets.estimate import estimate as of
    from presets.tables import read_toml

    given = Path(args.run)
    places = [given, given / "run.toml", presets.data_root() / "outputs" / args.run / "run.toml"]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise presets.PresetError(
            f"no run {args.run!r}: neither a run.toml, a run's folder, nor one in {places[2].parent.parent}"
        )
    result = of(read_toml(path))
    for stage, gigabytes in result["stages_gb"].items():
        print(f"{stage:10} {gigabytes:6.1f} GB" + ("  ← the most" if stage == result["peak_stage"] else ""))
    print("training is " + ", ".join(f"{part} {gigabytes:.2f}" for part, gigabytes in result["parts_gb"].items()))
    fits = [tier for tier, fit in result["fits"].items() if fit]
    print(f"fits: {', '.join(fits) or 'none of the tiers'} ({result['note']})")
    if args.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
