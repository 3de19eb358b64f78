"""What a patch is made of."""

import ast

import pytest

from sd_scripts_patches import patch


def test_find_one_refuses_none_and_several():
    tree = ast.parse("a = 1\nb = 2\nb = 2\n")

    def assigns(name):
        return lambda n: n.targets[0].id == name

    assert patch.find_one(tree, ast.Assign, assigns("a"), "a = …").lineno == 1
    for name, found in (("b", 2), ("c", 0)):
        with pytest.raises(patch.Incompatible, match=f"found {found}"):
            patch.find_one(tree, ast.Assign, assigns(name), f"{name} = …")
