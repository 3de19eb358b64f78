"""The names by which hooks know a module."""

from sd_scripts_patches import hooks


def test_a_script_is_known_by_the_name_of_its_module(tmp_path, monkeypatch):
    monkeypatch.setenv(hooks.CHECKOUT_VARIABLE, str(tmp_path / "src"))
    assert hooks.module_name(tmp_path / "src/musubi_tuner/wan_train.py") == "musubi_tuner.wan_train"
    assert hooks.module_name(tmp_path / "zimage_train_network.py") == "zimage_train_network"
