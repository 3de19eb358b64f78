"""A run's name makes the name of its folder."""

import pytest

import runs


def test_names_make_folders():
    for name, folder in (
        ("My LoRA_v1.0", "My-LoRA_v1-0"), ("  déjà vu ", "deja-vu"), ("../../etc", "etc"), ("日本", "Ri-Ben"),
        ("a" * 200, "a" * 80), ("-rf", "rf"), ("$(id)", "id"), ("com10", "com10"),
    ):  # fmt: skip
        assert runs.slug(name) == folder
    for name in ("", "  ", "☃", "__", "nul", "COM1", "...", "/"):
        with pytest.raises(runs.RunError):
            runs.slug(name)
