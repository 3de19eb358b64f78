"""What `./start.sh doctor` says of a trainer; the complete command: tests/process/test_doctor.py."""

from doctor import installed
from sd_scripts_patches.trainers import TRAINERS


def test_what_is_not_installed_is_a_note_and_what_is_half_installed_a_failure_with_its_fix(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    for name, place in (("SD_SCRIPTS_DIR", "s"), ("MUSUBI_DIR", "m"), ("MUSUBI_VENV", "v")):
        monkeypatch.setenv(name, str(tmp_path / place))
    (absent,) = installed(TRAINERS["sd-scripts"], quick=True)
    assert absent.status == "note" and "./start.sh sd-scripts installs v0." in absent.text
    _, half = installed(TRAINERS["musubi"], quick=True)
    assert (half.status, half.action) == ("failed", "Run ./start.sh musubi.") and str(tmp_path / "v") in half.text
