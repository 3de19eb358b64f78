"""Are faults in the code found? Small changes of it, drawn by a seed, each tried with the tests that could notice.

    python tests/campaigns/mutants.py [--seed 1] [--number 40] [--json]

A mutant is one change: a comparison or another condition that is negated, `and` for `or`, a number, a call that is left
out, a result that is dropped. (`<=` for `<` is none: of a clock or a size, neither a test nor a user could tell.) It is
tried with the tests of its module, with those that import it, then with every everyday test: on two cores 20 seconds
for a mutant that the first two catch, four minutes for one that none catches.
Exit code 1 when fewer than 80 in 100 are caught, 2 when the tests fail without a mutant.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("guards", "monitor", "runs", "launch", "ui/dataset")
PLACES += ("sd_scripts_patches/runner.py", "sd_scripts_patches/__main__.py")
EVERYDAY = re.findall(r'-m "(.+journey)"', (ROOT / "test.sh").read_text(encoding="utf-8"))[0]  # as ./test.sh selects
LIMIT_S = 600.0
OPPOSITE: dict[type[ast.cmpop], str] = {
    ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """In `file`, the characters from `start` to `end` (line, column in bytes) become `text`."""

    file: str
    start: tuple[int, int]
    end: tuple[int, int]
    text: str
    kind: str
    was: str

    def __str__(self) -> str:
        return f"{self.file}:{self.start[0]}: {self.was} → {self.text}"


def changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(kind, new text) of each change of a node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield "comparison", f"({left} {OPPOSITE[type(node.ops[0])]} {right})"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield "and/or", f"({word.join(f'({ast.unparse(value)})' for value in node.values)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "number", repr(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "bool", repr(not node.value)
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)) and not isinstance(node.test, (ast.Compare, ast.Constant)):
        yield "condition", f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call", "pass"
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "result", "return None"


def mutants(path: Path) -> list[Mutant]:
    """All changes inside the functions of a file."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    texts = {id(inner) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for inner in ast.walk(n)}  # wrong places
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    found = {}
    for function in functions:
        for node in (inner for statement in function.body for inner in ast.walk(statement)):
            for kind, text in changes(node) if id(node) not in texts else ():
                place = node.test if kind == "condition" and isinstance(node, (ast.If, ast.IfExp, ast.While)) else node
                assert isinstance(place, (ast.expr, ast.stmt)) and place.end_lineno and place.end_col_offset is not None
                start, end = (place.lineno, place.col_offset), (place.end_lineno, place.end_col_offset)
                was = " ".join((ast.get_source_segment(source, place) or "").split())[:80]
                found[start, end, kind] = Mutant(path.relative_to(ROOT).as_posix(), start, end, text, kind, was)
    return [found[key] for key in sorted(found)]


def draw(number: int, seed: int) -> list[Mutant]:
    """`number` mutants, no two of one file while there are files left: a file by chance, then one of its changes."""
    patterns = [place if place.endswith(".py") else f"{place}/**/*.py" for place in PLACES]
    files = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    by_file = [found for path in files if (found := mutants(path))]
    chance = random.Random(f"mutants {seed}")
    chance.shuffle(by_file)
    return [chance.choice(by_file[n % len(by_file)]) for n in range(number)]


def apply(mutant: Mutant, root: Path) -> str:
    """Write the mutant into a copy; returns the file's own text."""
    path = root / mutant.file
    source = path.read_text(encoding="utf-8")
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    (first, a), (last, b) = mutant.start, mutant.end
    lines[first - 1 : last] = [lines[first - 1][:a] + mutant.text.encode() + lines[last - 1][b:]]
    text = b"".join(lines).decode()
    ast.parse(text)
    path.write_text(text, encoding="utf-8")
    return source


def stages(mutant: Mutant, root: Path) -> dict[str, list[str]]:
    """The tests of its module, those that import it, then all."""
    file = Path(mutant.file)
    package, name = ".".join(file.parts[:-1]), file.stem
    says = re.compile(rf"from {package} import [^\n]*\b{name}\b|(from|import) {package}\.{name}\b")
    own = set(root.glob(f"tests/*/{file.parent}/test_{name.strip('_')}.py"))
    users = {path for path in root.glob("tests/*/**/test_*.py") if says.search(path.read_text(encoding="utf-8"))} - own
    found = {"module": own, "users": users, "everyday": {root / "tests"}}
    return {stage: sorted(map(str, paths)) for stage, paths in found.items() if paths}


def run_tests(paths: list[str], root: Path) -> str:
    """The first failure of the everyday tests there; "" where all pass."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "-n", "3", "--dist", "loadfile", "-m", EVERYDAY]
    command = [sys.executable, "-m", "pytest", *options, *paths]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return "the tests did not end"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "" if done.returncode in (0, 5) else failed[0][:160] if failed else f"pytest ended with {done.returncode}"


def caught_by(mutant: Mutant, root: Path) -> tuple[str, str]:
    """(stage, test) that noticed; ("", "") where none did."""
    source = apply(mutant, root)
    try:
        for name, paths in stages(mutant, root).items():
            if failure := run_tests(paths, root):
                return name, failure
        return "", ""
    finally:
        (root / mutant.file).write_text(source, encoding="utf-8")


def copy() -> Path:
    """A copy of the project's files in its own repository (some tests ask git for the files), with its environment."""
    root = Path(tempfile.mkdtemp(prefix="hangproof-mutants-"))
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / name)
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    subprocess.run(["git", "add", "--all"], cwd=root, check=True)
    os.symlink(ROOT / ".venv", root / ".venv")
    return root


def main(argv: list[str] | None = None) -> int:
    """Exit code as the module says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="end standard output with one line of JSON")
    args = parser.parse_args(argv)
    rows, root = [], copy()
    print(f"seed {args.seed}", file=sys.stderr)
    try:
        if failure := run_tests(["tests"], root):  # it would seem to catch every mutant
            print(f"the tests fail without a mutant: {failure}", file=sys.stderr)
            return 2
        for number, mutant in enumerate(draw(args.number, args.seed), 1):
            begun_s = time.monotonic()
            stage, test = caught_by(mutant, root)
            rows.append({"number": number, **asdict(mutant), "stage": stage, "test": test})
            verdict = f"caught ({stage}: {test})" if stage else "NOT CAUGHT"
            print(f"{number:3} {mutant}\n    {verdict} {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    caught = sum(bool(row["stage"]) for row in rows)
    print(f"{caught} of {len(rows)} mutants caught")
    if args.json:
        print(json.dumps({"seed": args.seed, "caught": caught, "mutants": rows}))
    return 0 if caught >= 0.8 * len(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
