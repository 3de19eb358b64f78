"""Sample images and checkpoints on request, between two steps: the training stays the same.

With musubi-tuner, and with several processes: tests/campaigns/test_world.py.
"""

import resume_helpers
import tiny_sd_scripts
from monitor_helpers import answers, asking

SAVES = ["--save_state", "--save_every_n_steps", "12", "--save_last_n_steps", "0"]


def test_requests_leave_the_lora_of_sd_scripts_the_same(work, tmp_path):
    plain, asked = tmp_path / "plain", tmp_path / "asked"
    more = ["--sample_prompts", str(work / "prompts.txt"), "--sample_every_n_epochs", "100", "--flip_aug", *SAVES]
    for out, env in ((plain, {}), (asked, asking(asked))):
        done = resume_helpers.train(work, out, *more, max_train_steps="14", env=env)
    assert tiny_sd_scripts.losses(plain / "losses") == tiny_sd_scripts.losses(asked / "losses")
    one, other = (resume_helpers.tensors(folder / "made/tiny.safetensors") for folder in (plain, asked))
    assert one == other
    found, made = answers(asked), asked / "made"
    assert [found[kind]["done"] for kind in ("sample", "state", "save")] == [True] * 3, (found, done.log[-3000:])
    images = list((made / "sample").glob(f"*_{found['sample']['step']:06d}_*.png"))
    assert images and found["sample"]["message"].startswith(f"{len(images)} sample image")
    kept, saved = (f"tiny-step{found[kind]['step']:08d}" for kind in ("state", "save"))
    assert (made / f"{saved}.safetensors").is_file()
    states = {path.name for path in made.glob("*-step*-state")}
    assert {f"{kept}-state", f"{saved}-state"}.isdisjoint(states), "old ones go as usual"
