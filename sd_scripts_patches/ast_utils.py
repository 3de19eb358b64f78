"""Helpers for rewrites of syntax trees: find a statement by its text, insert others beside it, check for variables."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from sd_scripts_patches.patch import Incompatible, Node, find_one


def parse_statements(text: str) -> list[ast.stmt]:
    """Return the statements in `text`."""
    return ast.parse(text).body


def parse_expression(text: str) -> ast.expr:
    """Return the expression in `text`."""
    return ast.parse(text, mode="eval").body


def find_statement(tree: ast.AST, kind: type[Node], text: str, prefix: bool = False) -> Node:
    """Return the only statement of `kind` whose source (of a loop: its header) is `text` (prefix: starts with it).

    Raises Incompatible when there is none or more than one.
    """

    def matches(node: Node) -> bool:
        if isinstance(node, ast.For):
            source = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
        else:
            source = ast.unparse(node)
        return source.startswith(text) if prefix else source == text

    return find_one(tree, kind, matches, f"the statement {text!r}")


def find_call(tree: ast.AST, function: str, owner: str = "") -> ast.Expr:
    """Return the only statement that is a call of `function`, whatever module stands before its name.

    owner: the name that must stand before it. Raises Incompatible when there is none or more than one.
    """

    def matches(node: ast.Expr) -> bool:
        call = node.value
        if not isinstance(call, ast.Call):
            return False
        name = ast.unparse(call.func).split(".")
        return name[-1] == function and (not owner or name[:-1] == owner.split("."))

    return find_one(tree, ast.Expr, matches, f"a call of {function}()")


def insert_import(tree: ast.Module, text: str) -> None:
    """Insert an import at the top of a module, after its docstring and its `from __future__` imports."""
    body = tree.body
    index = 0
    while index < len(body) and (
        (isinstance(body[index], ast.Expr) and isinstance(getattr(body[index], "value", None), ast.Constant))
        or (isinstance(body[index], ast.ImportFrom) and getattr(body[index], "module", "") == "__future__")
    ):
        index += 1
    body[index:index] = parse_statements(text)


def insert(tree: ast.AST, node: ast.stmt, before: str = "", after: str = "") -> None:
    """Insert statements (as text) right before and right after `node`, a statement somewhere below `tree`."""
    body = enclosing_body(tree, node)
    index = next(i for i, n in enumerate(body) if n is node)
    body[index : index + 1] = [*parse_statements(before), node, *parse_statements(after)]


def enclosing_body(tree: ast.AST, node: ast.stmt) -> list[ast.stmt]:
    """Return the list of statements that contains `node`."""
    for parent in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(parent, name, None)
            if isinstance(body, list) and any(n is node for n in body):
                return body
    raise Incompatible(f"{ast.unparse(node).splitlines()[0]!r} is not in the tree")


def require_variables(function: ast.FunctionDef, names: Iterable[str]) -> None:
    """Raise Incompatible unless `function` binds every one of `names` (parameter, assignment, loop, `with`)."""
    bound = {a.arg for a in function.args.args}
    bound |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    missing = sorted(set(names) - bound)
    if missing:
        raise Incompatible(f"{function.name}() has no variable {', '.join(missing)}")
