"""The position of a run after so many steps, and states that are refused. No training run."""

import json

import pytest

from guards import checkpoint
from sd_scripts_patches import legacy_state, trainer_state


def state(folder, **train_state):
    made = folder / "tiny-step00000012-state"
    made.mkdir()
    (made / "train_state.json").write_text(json.dumps(train_state))
    return made


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", '{"current_epoch": 1}', '{"current_epoch": 1, "current_step": -3}', '{"current_epoch": 1, "current_step": "12"}']
)  # fmt: skip
def test_a_missing_or_damaged_json_is_refused_unless_the_user_gives_the_step(tmp_path, text):
    made = state(tmp_path, current_epoch=2, current_step=12)
    legacy_state.check_state(made)
    path = made / "train_state.json"
    path.unlink() if text is None else path.write_text(text)
    reason = "is missing, so the step of this state is unknown" if text is None else "is damaged"
    with pytest.raises(trainer_state.ResumeError, match=rf"train_state\.json {reason}.*--initial_step"):
        legacy_state.check_state(made)
    legacy_state.check_state(made, step_is_given=True)


def test_a_missing_folder_and_a_damaged_state_with_a_guard_file_are_refused_and_named(tmp_path):
    made = tmp_path / "tiny-step00000012-state"
    with pytest.raises(trainer_state.ResumeError, match="the folder does not exist"):
        legacy_state.check_state(made)
    with checkpoint.writing(made, 12, 1) as folder:
        (folder / "train_state.json").write_text(json.dumps({"current_epoch": 2, "current_step": 12}))
        (folder / "optimizer.bin").write_bytes(b"x" * 100)
    legacy_state.check_state(made)
    (made / "optimizer.bin").write_bytes(b"x" * 50)
    with pytest.raises(trainer_state.ResumeError, match=r"optimizer\.bin: truncated: 50 bytes instead of 100"):
        legacy_state.check_state(made)


# step, batches, accumulation → epoch, batch
POSITIONS = [
    (0, 10, 1, 1, 0), (1, 10, 1, 1, 1), (10, 10, 1, 1, 10), (15, 10, 1, 2, 5), (3, 10, 2, 1, 6), (5, 10, 2, 1, 10),
    (7, 10, 3, 2, 9), (4, 10, 3, 1, 10), (8, 10, 3, 2, 10), (3, 5, 4, 2, 4), (2, 5, 4, 1, 5), (6, 3, 8, 6, 3),
]  # fmt: skip


@pytest.mark.parametrize(("step", "batches", "accumulation", "epoch", "batch"), POSITIONS)
def test_the_position_in_an_epoch_after_so_many_steps(step, batches, accumulation, epoch, batch):
    found = legacy_state.state_at_step(step, (batches, accumulation, 1), epoch_over=True, now=None)
    assert (found.epoch, found.batch) == (epoch, batch)
    assert found.epoch_over == (batch == batches)
