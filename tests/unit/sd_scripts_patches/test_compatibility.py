"""Where names are found, and which folder is a checkout of what: without a checkout."""

from sd_scripts_patches import compatibility, patch


def test_names_are_found_where_python_finds_them(tmp_path):
    (tmp_path / "library").mkdir()
    (tmp_path / "library/m.py").write_text(
        "import numpy as np\ntry:\n    import fast\nexcept ImportError:\n    def f(a, b): ...\n"
        "if True:\n    class A:\n        class B:\n            def g(self, x=1): ...\n"
    )

    def found(name, **more):
        return compatibility.check_target(patch.Target("library.m", name, **more), tmp_path)

    for name in ("np", "fast", "f", "A.B.g"):
        assert found(name).verdict == "guarded", name
    assert found("A.B.g", params=("self", "x")).verdict == "guarded"
    assert "takes (self, x), expected (x" in found("A.B.g", params=("x",)).reason
    assert found("A.h").verdict == "missing" and "'h' is missing" in found("A.h").reason


def checkout(folder, *files):
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def test_a_checkout_is_recognized_by_its_modules_wherever_its_scripts_lie(tmp_path):
    root = checkout(tmp_path / "m", "src/musubi_tuner/training/trainer_base.py", "src/musubi_tuner/dataset/x.py")
    expected = compatibility.Checkout(compatibility.MUSUBI, root / "src")
    assert compatibility.find_checkout(root) == expected
    assert compatibility.find_checkout(root / "src/musubi_tuner") == expected
    other = checkout(tmp_path / "s", "train_network.py", "library/x.py", "networks/x.py")
    assert compatibility.find_checkout(other) == compatibility.Checkout(compatibility.SD_SCRIPTS, other)
    assert compatibility.find_checkout(tmp_path) is None
