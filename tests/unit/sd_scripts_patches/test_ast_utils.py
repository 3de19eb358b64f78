"""Rewrites of syntax trees: statements are found by their text, and what is not there exactly once is refused."""

import ast

import pytest

from sd_scripts_patches import ast_utils
from sd_scripts_patches.patch import Incompatible

SOURCE = """from __future__ import annotations
for epoch in range(3):
    total += 1
    library.save(args)
"""
REWRITTEN = """from __future__ import annotations
import ours
for epoch in range(3):
    ours.before()
    total += 1
    library.save(args)
    ours.saved()
ours.end()"""


def test_statements_are_inserted_beside_the_one_that_is_found():
    tree = ast.parse(SOURCE)
    ast_utils.insert(tree, ast_utils.find_statement(tree, ast.AugAssign, "total += 1"), before="ours.before()")
    ast_utils.insert(tree, ast_utils.find_call(tree, "save", owner="library"), after="ours.saved()")
    ast_utils.insert(tree, ast_utils.find_statement(tree, ast.For, "for epoch in range(3)"), after="ours.end()")
    ast_utils.insert_import(tree, "import ours")
    assert ast.unparse(tree) == REWRITTEN


def test_what_is_not_there_exactly_once_is_refused():
    tree = ast.parse(SOURCE + "total += 1\n")
    with pytest.raises(Incompatible, match=r"the statement 'total \+= 1': expected exactly one, found 2"):
        ast_utils.find_statement(tree, ast.AugAssign, "total += 1")
    with pytest.raises(Incompatible, match=r"a call of save\(\): expected exactly one, found 0"):
        ast_utils.find_call(tree, "save", owner="module")
    train = ast.parse("def train(args):\n    step = 1").body[0]
    with pytest.raises(Incompatible, match=r"train\(\) has no variable epoch, loss"):
        ast_utils.require_variables(train, ("args", "step", "loss", "epoch"))
