"""Several processes of the built-in trainer: one stands still, the group is not formed, a person starts the script."""

import pytest
from trainer_helpers import environment
from world_trainings import images_and_model, together

from guards import heartbeat


def test_a_group_that_accelerate_does_not_form_is_refused_by_every_rank(work, tmp_path):
    """As on a machine where accelerate finds no device to join by: the fault that made two runs of one."""
    env = {"HANGPROOF_INJECT": "blind:nothing", "PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}"}
    (tmp_path / "blind.py").write_text(
        "from guards import world\nworld.choose_backend = lambda: ''\ndef nothing(*_): pass\n", encoding="utf-8"
    )
    done = together(work, tmp_path, 2, env=env)
    assert done.returncode == 1
    assert "the launcher started 2 processes, but accelerate joined 1 of them." in done.stdout
    assert not list((tmp_path / "made").glob("*.safetensors"))


def test_a_rank_that_stands_still_ends_the_others_wait(work, tmp_path):
    """Rank 1 is stopped as by Ctrl-Z; rank 0 waits for it in the next step, and not for ever. The launcher ends rank 1."""
    done = together(work, tmp_path, 2, fault="stop@3:1", env={"HANGPROOF_PHASE_STEP_S": "6"})
    assert done.returncode == 1 and "waited 6 s for any progress in phase step" in done.stdout, done.stdout[-3000:]
    first = heartbeat.read_all(tmp_path / "beats")[0]
    assert (first.step, first.outcome) == (3, "deadline")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return images_and_model(tmp_path_factory.mktemp("world"))
