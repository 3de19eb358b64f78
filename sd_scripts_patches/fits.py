"""Does a patch fit this checkout? Answered from the syntax trees alone: no torch, no import of sd-scripts, ~1 s.

Asked twice: by `check DIR`, for a person, and by the launcher before it starts the script, so that a checkout that
has moved on stops at once with a table, not after ten minutes of loading or, worse, unguarded.
"""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import importlib.util
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from sd_scripts_patches.patch import DoesNotFit, Patch, Target, definitions

FITS, UNFIT, UNNEEDED = "fits", "does not fit", "not needed"
MARKS = ("library/train_util.py", "train_network.py")
"""Files by which a folder is known for an sd-scripts checkout."""


@dataclass(frozen=True)
class Finding:
    """One patch against one checkout. binds: one line per target, `module:name`, with what is wrong where something is."""

    patch: str
    verdict: str
    relied_on: bool
    why: str
    binds: tuple[str, ...]
    reason: str


def is_checkout(folder: Path) -> bool:
    """True where `folder` holds sd-scripts."""
    return all((folder / mark).is_file() for mark in MARKS)


def locate(module: str, checkout: Path | None) -> Path | None:
    """The source file of a module, without importing it or its parents; None where there is none."""
    parts = module.split(".")
    if checkout is not None:
        for candidate in (checkout.joinpath(*parts).with_suffix(".py"), checkout.joinpath(*parts, "__init__.py")):
            if candidate.is_file():
                return candidate
        if (checkout / f"{parts[0]}.py").is_file() or (checkout / parts[0]).is_dir():
            return None  # the checkout shadows an installed package of that name
    try:
        spec = importlib.machinery.PathFinder.find_spec(parts[0])
    except ImportError:
        return None
    if spec is None or spec.origin is None:
        return None
    if len(parts) == 1:
        return Path(spec.origin)
    for folder in spec.submodule_search_locations or []:
        below = Path(folder).joinpath(*parts[1:])
        for candidate in (below.with_suffix(".py"), below / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def parse_anew(path: Path) -> ast.Module:
    """The syntax tree of a file, for a caller that changes it. Raises SyntaxError with the file's name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # escapes in its strings: for its author, not for who only asks
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


parse = functools.lru_cache(maxsize=64)(parse_anew)


def problem(target: Target, checkout: Path | None) -> tuple[str, str]:
    """(verdict, reason) of one target."""
    path = locate(target.module, checkout)
    if path is None:
        if target.optional or not _belongs_to_checkout(target.module):
            return UNNEEDED, f"{target.module} is not here"
        return UNFIT, f"{target.module}: no such module"
    try:
        tree = parse(path)
        node = _find(tree, target.name) if target.name else tree
    except SyntaxError as error:
        return UNFIT, f"{path}: {error.msg} (line {error.lineno})"
    except DoesNotFit as error:
        return (UNNEEDED if target.optional else UNFIT), f"{target}: {error}"
    if target.params is not None:
        found = _parameters(node)
        if found is None:
            return UNFIT, f"{target}: is no function"
        if found[: len(target.params)] != target.params:
            return UNFIT, f"{target}: takes ({', '.join(found)}), expected ({', '.join(target.params)}, …)"
    if target.check is not None:
        complaint = target.check(tree)
        if complaint:
            return UNFIT, f"{target}: {complaint}"
    return FITS, ""


def judge(patch: Patch, checkout: Path | None) -> Finding:
    """The verdict on one patch: it does not fit as soon as one target or one rewrite does not."""
    lines, reasons, verdicts = [], [], []
    for target in patch.targets:
        verdict, reason = problem(target, checkout)
        verdicts.append(verdict)
        lines.append(str(target) if verdict == FITS else f"{target} ({verdict})")
        if reason and verdict == UNFIT:
            reasons.append(reason)
    for module, rewrite in patch.rewrite.items():
        path = locate(module, checkout)
        if path is None:
            continue  # a target says whether that matters
        try:
            rewrite(parse_anew(path))
        except DoesNotFit as error:
            verdicts.append(UNFIT)
            reasons.append(f"{module}: {error}")
        else:
            lines.append(f"{module} (rewritten)")
    if UNFIT in verdicts:
        return Finding(patch.name, UNFIT, patch.relied_on, patch.why, tuple(lines), "; ".join(reasons))
    if verdicts and all(v == UNNEEDED for v in verdicts):
        return Finding(patch.name, UNNEEDED, patch.relied_on, patch.why, tuple(lines), "nothing here to guard")
    return Finding(patch.name, FITS, patch.relied_on, patch.why, tuple(lines), "")


def table(findings: list[Finding]) -> str:
    """The findings as text, one patch a block: verdict, name, why; then its bindings; then what is wrong."""
    lines = []
    for f in findings:
        lines.append(f"{f.verdict:<12}  {f.patch:<11}  {f.why}")
        lines += [f"{'':<14}{bind}" for bind in f.binds]
        if f.verdict == UNFIT:
            lines.append(f"{'':<14}! {f.reason}")
    return "\n".join(lines)


def as_json(findings: list[Finding]) -> list[dict]:
    """The findings as plain values."""
    return [asdict(f) for f in findings]


def _belongs_to_checkout(module: str) -> bool:
    head = module.split(".")[0]
    return head in ("library", "networks", "tools", "finetune") or "train" in head


def _find(tree: ast.Module, name: str) -> ast.AST:
    node: ast.AST = tree
    for part in name.split("."):
        found = next((n for n in definitions(getattr(node, "body", [])) if part in _names(n)), None)
        if found is None:
            raise DoesNotFit(f"there is no {part!r}")
        node = found
    return node


def _names(node: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {t.id for t in node.targets if isinstance(t, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(a.asname or a.name.split(".")[0]) for a in node.names}
    return set()


def _parameters(node: ast.AST) -> tuple[str, ...] | None:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    return tuple(a.arg for a in [*node.args.posonlyargs, *node.args.args])
