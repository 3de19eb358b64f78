"""`python -m presets list|lint`: show the tables, lint a training script. (`python -m runs` has `estimate`.)"""

import argparse
import difflib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import presets
from presets import terminal


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m presets", description="Tiers, models, and lint of scripts.")
    commands = top.add_subparsers(dest="command", required=True)
    listing = terminal.add_command(commands, "list", "list VRAM tiers, model families and base models")
    lint = terminal.add_command(commands, "lint", "find what is known to hang or fail in a training script")
    lint.add_argument("script", help="a bash script, batch file (.bat) or PowerShell script (.ps1)")
    lint.add_argument("--fix", action="store_true", help="fix these in a bash script or batch file; it trains the same")
    for command in (listing, lint):
        command.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    return top


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: done (lint: no findings). 1: failed, or lint has findings. 2: wrong usage."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["estimate"]:  # a command of `runs`, because it reads one; this was its name
        return subprocess.call([sys.executable, "-m", "runs", *words])
    args = parser().parse_args(words)
    try:
        return {"list": show, "lint": lint}[args.command](args)
    except presets.PresetError as error:
        print(f"presets: {error}", file=sys.stderr)
        return 1


def show(args: argparse.Namespace) -> int:
    """Print the tiers, and each family with its models, its trainers and the memory that it needs by tier."""
    tiers, models, families = presets.tiers(), presets.models(), presets.families()
    print("Tiers (--tier)")
    for name, tier in tiers.items():
        print(f"  {name:6} {tier['label']}: {tier['note']}")
    for name, family in families.items():
        print(f"{family['name']} ({name})")
        of_family = {key: model for key, model in models.items() if model["family"] == name}
        for key, model in of_family.items():
            print(f"  {key:18} {model['name']} · {model['licence']} · {', '.join(model['backends'])}")
        for backend in family["backends"]:
            able = [key for key, model in of_family.items() if backend in model["backends"]]
            for rows in (presets.tiers_of(key, backend).items() for key in able[:1]):
                needs = [f"{tier} -" if row["problem"] else f"{tier} {row['needs_gb']:g} GB" for tier, row in rows]
                print(f"  GPU memory with {presets.backends()[backend]['label']}: {', '.join(needs)}")
    if args.json:
        by_model = {key: {b: presets.tiers_of(key, b) for b in model["backends"]} for key, model in models.items()}
        result = {"tiers": tiers, "backends": presets.backends(), "families": families, "models": models}
        print(json.dumps({**result, "tiers_of": by_model}))
    return 0


def lint(args: argparse.Namespace) -> int:
    """Print the findings of a script; with --fix, fix them first and print the changes."""
    from presets.fix import Fixed, fix
    from presets.lint import lint as find
    from presets.training import trainings

    path = Path(args.script)
    text, name, base = _text(path), path.name, path.absolute().parent
    if not trainings(text, name, base):
        raise presets.PresetError(f"{path}: no training command found; lint knows kohya's trainers and `-m trainer`")
    fixed = fix(text, name, base) if args.fix else Fixed(text)
    # What is left after --fix has to be fixed by hand.
    findings = [replace(one, fixable=one.fixable and not args.fix) for one in find(fixed.text, name, base)]
    if fixed.text != text:
        _replace(path, fixed.text)
        lines = text.splitlines(), fixed.text.splitlines()
        print(*difflib.unified_diff(*lines, name, f"{name} (fixed)", lineterm=""), sep="\n")
    for rule, _, change in fixed.changes:
        print(f"{path}: fixed {rule}: {change.text}")
    for finding in findings:
        print(f"{path}:{finding.line}: {finding.id} ({finding.level}): {finding.why}\n    {finding.fix}")
    if not findings:
        print(f"{path}: no problems found")
    if args.json:
        changes = [{"rule": r, "command": i + 1, **asdict(c), "text": c.text} for r, i, c in fixed.changes]
        found = [asdict(one) for one in findings]
        print(json.dumps({"clean": not findings, "findings": found, "fixed": fixed.fixed, "changes": changes}))
    return 1 if findings else 0


def _text(path: Path) -> str:
    """A script's text; PowerShell's may be UTF-16."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise presets.PresetError(f"{path}: {error.strerror}; check the path") from error
    if content[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        return content.decode("utf-8", "surrogateescape")
    if path.suffix.lower() != ".ps1":
        raise presets.PresetError(f"{path}: UTF-16 text, which bash and cmd cannot run; save the file as UTF-8")
    return content.decode("utf-16", "replace")


def _replace(script: Path, text: str) -> None:
    """Replace the script atomically; its permissions stay, and a link to it stays a link."""
    path = script.resolve()
    new = path.with_name(f".{path.name}.fixed")
    try:
        new.write_bytes(text.encode("utf-8", "surrogateescape"))
        shutil.copymode(path, new)
        os.replace(new, path)
    except OSError as error:
        new.unlink(missing_ok=True)
        advice = "the script is unchanged. Check the folder's permissions and free space"
        raise presets.PresetError(f"{script}: cannot be replaced: {error.strerror}; {advice}") from error


if __name__ == "__main__":
    sys.exit(terminal.command(main))
