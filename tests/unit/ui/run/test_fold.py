"""Parts that are made when they are opened."""

import ast

from runs.paths import ROOT


def test_each_tick_of_such_a_part_has_a_key_of_its_own():
    keys = []
    for path in sorted((ROOT / "ui").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "def draw(" not in source and path.name != "fold.py":
            continue
        for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr == "tick":
                keys += [ast.unparse(word.value) for word in call.keywords if word.arg == "key"] or [path.name]
    assert len(keys) == len(set(keys)) > 4 and not [key for key in keys if key.endswith(".py")]
