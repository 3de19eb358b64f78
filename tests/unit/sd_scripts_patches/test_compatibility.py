"""Which folder is a checkout of what."""

from sd_scripts_patches import compatibility


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
