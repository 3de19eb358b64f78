"""Sample images and checkpoints on request, between two steps of kohya's trainers: the training stays the same."""

import resume_helpers
import tiny_musubi
import tiny_sd_scripts
from monitor_helpers import answers, asking
from musubi_helpers import train as train_musubi

SAVES = ["--save_state", "--save_every_n_steps", "12", "--save_last_n_steps", "0"]


def compare(plain, asked, log):
    """The two runs have the same losses and LoRA, and all that was requested was done."""
    assert tiny_sd_scripts.losses(plain / "losses") == tiny_sd_scripts.losses(asked / "losses")
    one, other = (resume_helpers.tensors(folder / "made/tiny.safetensors") for folder in (plain, asked))
    assert one == other
    found = answers(asked)
    assert [found[kind]["done"] for kind in ("sample", "state", "save")] == [True] * 3, (found, log[-3000:])
    made = asked / "made"
    number = found["sample"]["step"]
    images = [path for path in (made / "sample").glob("*.png") if f"_{number:06d}_" in path.name]
    assert images and found["sample"]["message"].startswith(f"{len(images)} sample image")
    saved = found["save"]["step"]
    assert (made / f"tiny-step{saved:08d}.safetensors").is_file()
    states = {path.name for path in made.glob("*-step*-state")}
    assert {f"tiny-step{found['state']['step']:08d}-state", f"tiny-step{saved:08d}-state"}.isdisjoint(states), states


def test_requests_leave_the_lora_of_sd_scripts_the_same(work, tmp_path):
    plain, asked = tmp_path / "plain", tmp_path / "asked"
    more = ["--sample_prompts", str(work / "prompts.txt"), "--sample_every_n_epochs", "100", "--flip_aug", *SAVES]
    for out, env in ((plain, {}), (asked, asking(asked))):
        done = resume_helpers.train(work, out, *more, max_train_steps="14", env=env)
    compare(plain, asked, done.log)


def test_requests_leave_the_lora_of_musubi_tuner_the_same(musubi, tmp_path):
    work = tiny_musubi.workdir()
    more = ["--sample_prompts", str(work / "prompts.txt"), "--sample_every_n_epochs", "100", *SAVES]
    more += ["--max_train_steps", "14"]
    plain, asked = tmp_path / "plain", tmp_path / "asked"
    for folder, env in ((plain, {}), (asked, asking(asked))):
        tiny_musubi.cached(work, folder)
        done = train_musubi(folder, *more, env=env)
    compare(plain, asked, done.log)
