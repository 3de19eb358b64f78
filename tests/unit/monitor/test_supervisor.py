"""The supervisor without a training: each state has a function, and a run is not completed without its LoRA."""

from monitor import recovery
from monitor.loop import Loop
from monitor.run_folder import RunFolder
from monitor.state import FINAL, State
from monitor.supervisor import STATES, turn


def test_a_lora_that_does_not_verify_is_never_called_completed(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").write_text('name = "run"\n')
    (folder / "run.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    loop = Loop(RunFolder(folder), turn)
    try:
        loop.at = loop.at.__class__(State.RUNNING)
        assert "damaged" in recovery.complete(loop)
        (folder / "run.safetensors").unlink()
        assert "missing" in recovery.complete(loop)
    finally:
        loop.at = loop.at.__class__(State.FAILED)
        loop.close()


def test_every_state_that_is_not_final_has_a_function():
    """An ending without a name once made the loop spin for ever with the GPU held."""
    assert set(STATES) == set(State) - FINAL
