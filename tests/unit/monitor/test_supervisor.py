"""The supervisor without a training: each state has a method, and a run is not completed without its LoRA."""

from monitor import recovery
from monitor.run_folder import RunFolder
from monitor.state import FINAL, State
from monitor.supervisor import Supervisor


def test_a_lora_that_does_not_verify_is_never_called_completed(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").write_text('name = "run"\n')
    (folder / "run.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    supervisor = Supervisor(RunFolder(folder), False, None, ())
    try:
        supervisor.at = supervisor.at.__class__(State.RUNNING)
        assert "damaged" in recovery.complete(supervisor.run)
        (folder / "run.safetensors").unlink()
        assert "missing" in recovery.complete(supervisor.run)
    finally:
        supervisor.at = supervisor.at.__class__(State.FAILED)
        supervisor.close()


def test_every_state_that_is_not_final_has_a_method(tmp_path):
    """An ending without a name once made the loop spin for ever with the GPU held."""
    supervisor = Supervisor(RunFolder(tmp_path), False, None, ())
    assert set(supervisor.states) == set(State) - FINAL
    supervisor.at = supervisor.at.__class__(State.FAILED)
    supervisor.close()
