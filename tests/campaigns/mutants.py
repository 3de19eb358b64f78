"""Are faults in the code found? Small changes of it, drawn by a seed, each tried with the tests that could notice.

    python tests/campaigns/mutants.py [--seed 1] [--number 40]

A mutant is one change: a comparison or another condition that is negated, `and` for `or`, a number, a call that is left
out, a result that is dropped. (`<=` for `<` is none: of a clock or a size, neither a test nor a user could tell.) It is
tried with the tests of its module, with those that import it, then with every everyday test: on two cores 20 seconds
for a mutant that the first two catch, four minutes for one that none catches.
What is committed is tried. Exit code 1 when fewer than 80 in 100 are caught, 2 when the tests fail without a mutant.
"""

import argparse
import ast
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
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
    """In `path`, the characters from `start` to `end` (line, column in bytes) become `text`."""

    path: Path
    start: tuple[int, int]
    end: tuple[int, int]
    text: str
    was: str

    def apply(self) -> str:
        """Write it to the file. Returns the file's own text."""
        source = self.path.read_text(encoding="utf-8")
        lines = [line.encode() for line in source.splitlines(keepends=True)]
        (first, a), (last, b) = self.start, self.end
        lines[first - 1 : last] = [lines[first - 1][:a] + self.text.encode() + lines[last - 1][b:]]
        text = b"".join(lines).decode()
        ast.parse(text)
        self.path.write_text(text, encoding="utf-8")
        return source


def changes(node: ast.AST):
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
    found = {}
    for function in (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))):
        for node in (inner for statement in function.body for inner in ast.walk(statement)):
            for kind, text in changes(node) if id(node) not in texts else ():
                place = node.test if kind == "condition" else node
                start, end = (place.lineno, place.col_offset), (place.end_lineno, place.end_col_offset)
                was = " ".join((ast.get_source_segment(source, place) or "").split())[:80]
                found[start, end, kind] = Mutant(path, start, end, text, was)
    return [found[key] for key in sorted(found)]


def draw(root: Path, number: int, seed: int) -> list[Mutant]:
    """`number` mutants, no two of one file while there are files left: a file by chance, then one of its changes."""
    patterns = [place if place.endswith(".py") else f"{place}/**/*.py" for place in PLACES]
    by_file = [found for path in sorted(path for p in patterns for path in root.glob(p)) if (found := mutants(path))]
    chance = random.Random(f"mutants {seed}")
    chance.shuffle(by_file)
    return [chance.choice(by_file[n % len(by_file)]) for n in range(number)]


def stages(file: Path, root: Path) -> dict[str, list[str]]:
    """The tests of a module of the project, those that import it, then all."""
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


def verdict(mutant: Mutant, root: Path) -> str:
    """Which stage caught it, and by which test; "" where none did."""
    source = mutant.apply()
    try:
        for name, paths in stages(mutant.path.relative_to(root), root).items():
            if failure := run_tests(paths, root):
                return f"caught ({name}: {failure})"
        return ""
    finally:
        mutant.path.write_text(source, encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Exit code as the module says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=40)
    args = parser.parse_args(argv)
    print(f"seed {args.seed}", file=sys.stderr)
    caught = 0
    with tempfile.TemporaryDirectory(prefix="hangproof-mutants-") as folder:
        root = Path(folder, "project")  # a clone of its own: some tests ask git for the files
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(root)], check=True)
        os.symlink(ROOT / ".venv", root / ".venv")
        if failure := run_tests(["tests"], root):  # it would seem to catch every mutant
            print(f"the tests fail without a mutant: {failure}", file=sys.stderr)
            return 2
        for number, mutant in enumerate(draw(root, args.number, args.seed), 1):
            begun_s, found = time.monotonic(), verdict(mutant, root)
            caught += bool(found)
            place = f"{mutant.path.relative_to(root)}:{mutant.start[0]}"
            print(f"{number:3} {place}: {mutant.was} → {mutant.text}", file=sys.stderr)
            print(f"    {found or 'NOT CAUGHT'} {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)
    print(f"{caught} of {args.number} mutants caught")
    return 0 if caught >= 0.8 * args.number else 1


if __name__ == "__main__":
    raise SystemExit(main())
