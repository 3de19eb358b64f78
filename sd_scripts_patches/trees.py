"""Small tools for rewrites of syntax trees: statements from text, insertion beside a node, names that must be there."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from sd_scripts_patches.patch import DoesNotFit, find_one


def statements(text: str) -> list[ast.stmt]:
    """The statements that `text` parses to."""
    return ast.parse(text).body


def find_statement(tree: ast.AST, kind: type[ast.stmt], text: str, prefix: bool = False) -> ast.stmt:
    """The one statement of `kind` that reads `text` (or begins with it). A loop is compared by its first line only.

    Raises DoesNotFit where there is none or more than one.
    """

    def matches(node: ast.AST) -> bool:
        if not isinstance(node, kind):
            return False
        line = (
            f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
            if isinstance(node, ast.For)
            else ast.unparse(node)
        )
        return line.startswith(text) if prefix else line == text

    return find_one(tree, matches, f"the statement {text!r}")


def insert(tree: ast.AST, node: ast.stmt, before: str = "", after: str = "") -> None:
    """Put statements (as text) right before and right after `node`, a statement somewhere below `tree`."""
    body = body_of(tree, node)
    index = next(i for i, n in enumerate(body) if n is node)
    body[index : index + 1] = [*statements(before), node, *statements(after)]


def body_of(tree: ast.AST, node: ast.stmt) -> list[ast.stmt]:
    """The list of statements that `node` stands in."""
    for parent in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(parent, name, None)
            if isinstance(body, list) and any(n is node for n in body):
                return body
    raise DoesNotFit(f"{ast.unparse(node).splitlines()[0]!r} is not where it was")


def require(function: ast.FunctionDef, names: Iterable[str]) -> None:
    """Raise DoesNotFit unless `function` binds every one of `names` (parameter, assignment, loop, `with`)."""
    bound = {a.arg for a in function.args.args}
    bound |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    missing = sorted(set(names) - bound)
    if missing:
        raise DoesNotFit(f"{function.name}() has no variable {', '.join(missing)}")
