"""Sample images and checkpoints on request, between two steps of each trainer: the training stays the same."""

import pytest
from monitor_helpers import answers, asking
from trainer_helpers import flags, fork, good, sha

from guards import checkpoint


def built_in(work, output, **changed):
    """The command line of a run with dropout, which draws random numbers, and samples that are due on request alone."""
    prompts = work["folder"] / "prompts.txt"
    prompts.write_text("a thing --w 64 --h 64 --s 2 --d 5\n" * 2, encoding="utf-8")
    given = {"sample_prompts": prompts, "sample_every_n_steps": 1000, "network_dropout": 0.2} | changed
    given = {"max_train_steps": 12, "save_every_n_steps": 10, **given}
    return flags(work["model"], work["config"], output, save_state=True, **given)


@pytest.fixture(scope="module")
def plain(work, tmp_path_factory):
    """The LoRA of a run without requests."""
    folder = tmp_path_factory.mktemp("plain")
    good(fork(built_in(work, folder)))
    return sha(folder / "tiny.safetensors")


def test_requests_leave_the_lora_of_the_built_in_trainer_the_same(work, plain, tmp_path):
    good(fork(built_in(work, tmp_path, save_last_n_steps=0), **asking(tmp_path)))
    assert plain == sha(tmp_path / "tiny.safetensors")
    found = answers(tmp_path)
    assert all(event["done"] for event in found.values()), found
    sampled, kept, saved = (found[kind]["step"] for kind in ("sample", "state", "save"))
    assert sampled >= 2 and kept >= 4 and saved >= 7
    images = [path.name for path in (tmp_path / "sample").iterdir()]
    assert len(images) == 2 and all(f"_{sampled:06d}_" in name for name in images)
    assert found["sample"]["message"] == f"2 of 2 sample images of step {sampled}, as requested"
    assert kept == saved or not (tmp_path / f"tiny-step{kept:08d}.safetensors").exists()  # a checkpoint alone
    assert (tmp_path / f"tiny-step{saved:08d}.safetensors").is_file()
    # Old ones go as usual: with save_last_n_steps 0 each save deletes the states before it.
    assert sorted(p.name for p in tmp_path.glob("*-step*-state")) == ["tiny-step00000010-state"]


def test_a_requested_checkpoint_is_complete_and_resumes_exactly(work, plain, tmp_path):
    good(fork(built_in(work, tmp_path), **asking(tmp_path, "state@3")))
    state = tmp_path / f"tiny-step{answers(tmp_path)['state']['step']:08d}-state"
    assert checkpoint.verify(state).usable
    (tmp_path / "tiny.safetensors").unlink()
    good(fork([*built_in(work, tmp_path), "--resume", str(state)]))
    assert plain == sha(tmp_path / "tiny.safetensors")


def test_a_run_without_prompts_says_so(work, tmp_path):
    argv = built_in(work, tmp_path, sample_prompts=None, sample_every_n_steps=None, max_train_steps=2)
    good(fork(argv, **asking(tmp_path, "sample@1")))
    found = answers(tmp_path)["sample"]
    assert not found["done"] and "the run has no prompts for sample images" in found["message"]
