"""Learning rates, and options that resume exactly: optimizers, averages, fewer bits, captions, a LoRA to begin with."""

from pathlib import Path

import pytest
import torch
from flux_parts import arguments, loaded
from safetensors.torch import load_file
from trainer_helpers import flags, make_config, sha, train, trained
from transformers import get_scheduler

from trainer import cache, dataset, families, lora, optimizers
from trainer.arguments import parse
from trainer.data_order import text_of
from trainer.errors import TrainError


@pytest.mark.parametrize("kind", ["constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"])
def test_learning_rates_are_those_of_transformers(kind):
    args = arguments(lr_scheduler=kind, lr_warmup_steps=5, lr_scheduler_num_cycles=2, learning_rate=1e-3)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    special = {"cosine_with_restarts": {"num_cycles": 2}}.get(kind)
    schedule = get_scheduler(kind, optimizer, 5, 30, scheduler_specific_kwargs=special)
    for step in range(30):
        assert 1e-3 * optimizers.factor(args, step, 30) == pytest.approx(schedule.get_last_lr()[0], rel=1e-9, abs=1e-15)
        optimizer.step()
        schedule.step()


def test_an_optimizer_option_that_does_not_exist_is_named():
    weights = [torch.nn.Parameter(torch.zeros(2, 2))]
    with pytest.raises(TrainError, match="wight_decay"):
        optimizers.build("adamw", {"wight_decay": "0.1"}, 1e-3, weights)
    with pytest.raises(TrainError, match="betas=0.9;0.99"):
        optimizers.build("adamw8bit", {"betas": "0.9;0.99"}, 1e-3, weights)


def test_a_schedule_free_lora_has_the_average_and_its_training_goes_on_unchanged():
    weight = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
    optimizer = optimizers.build("adamwschedulefree", {}, 0.1, [weight])
    for _ in range(3):
        (weight**2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = weight.detach().clone()
    found = optimizers.averaged(optimizer, {"w": weight})["w"]
    assert torch.equal(weight, before) and optimizer.param_groups[0]["train_mode"]
    optimizer.eval()
    assert torch.equal(found, weight) and not torch.equal(found, before)


CAPTIONS = {"shuffle_caption": True, "caption_dropout_rate": 0.3, "keep_tokens": 1}
# a run's flags, by what they are about
OPTIONS = {
    "prodigy": {"optimizer_type": "Prodigy", "learning_rate": 1, "optimizer_args": ["d_coef=2.0"]},
    "schedule-free": {"optimizer_type": "AdamWScheduleFree", "optimizer_args": ["warmup_steps=2"]},
    "lion": {"optimizer_type": "Lion8bit", "optimizer_args": ["min_8bit_size=16"], "learning_rate": 1e-4},
    "average": {"ema_decay": 0.9},
    "captions": CAPTIONS,
    "int8": {"quantize": "int8", "mixed_precision": "bf16"},
    "nf4": {"quantize": "nf4", "mixed_precision": "bf16"},
}


@pytest.fixture(scope="module")
def data(work):
    for number in range(5):
        (work["images"] / f"{number}.txt").write_text(f"thing, number {number}, small, red, round", encoding="utf-8")
    return make_config(work["folder"] / "options.toml", work["images"], batch_size=2)


def run(work, data, name, **changed):
    """The folder of a run of eight steps that saves each second one."""
    return trained(work, name, config=data, **{"max_train_steps": 8, "save_every_n_steps": 2, **changed})


@pytest.fixture(scope="module")
def plain(work, data):
    return run(work, data, "plain", save_every_n_steps=1)


@pytest.mark.parametrize("what", OPTIONS)
def test_a_run_that_goes_on_from_a_state_ends_with_the_bytes_of_one_that_was_not_interrupted(work, data, plain, what):
    whole = run(work, data, f"{what}-whole", **OPTIONS[what])
    resumed = run(work, data, f"{what}-resumed", resume=whole / "tiny-step00000004-state", **OPTIONS[what])
    assert sha(resumed / "tiny.safetensors") == sha(whole / "tiny.safetensors")
    assert sha(whole / "tiny.safetensors") != sha(plain / "tiny.safetensors")


def test_the_average_is_that_of_the_weights_of_all_steps(work, data, plain):
    averaged = run(work, data, "averaged", save_every_n_steps=4, ema_decay=0.5)
    first = {  # the weights before the first step, as a file has them
        f"transformer.{name}": value.detach() * (0.25 if "lora_B" in name else 1)
        for name, value in loaded(work["model"])[1].items()
    }
    for step in range(8):
        file = plain / ("tiny.safetensors" if step == 7 else f"tiny-step{step + 1:08d}.safetensors")
        share = 1 - min(0.5, (step + 1) / (step + 10))
        first = {name: value.lerp(load_file(file)[name], share) for name, value in first.items()}
    found = load_file(averaged / "tiny.safetensors")
    assert all(torch.allclose(found[name], value, atol=1e-7) for name, value in first.items())
    state = "tiny-step00000004-state/model.safetensors"
    assert sha(averaged / state) == sha(plain / state), "what is trained does not depend on the average"
    _, done = train(work, "averaged", config=data, resume=averaged / "tiny-step00000004-state")
    assert "ema_decay is 0.5 in the state and None in this run" in done.stderr


def test_a_caption_is_dropped_as_often_as_asked_and_its_first_tags_stay(work, data):
    args = parse(flags(work["model"], data, work["folder"], **CAPTIONS))
    one = dataset.read(Path(data), args)[0]
    used = [one.texts[text_of(one, "use", number)] for number in range(2000)]
    assert 0.25 < used.count("") / len(used) < 0.35
    told = {text for text in used if text}
    assert one.caption not in told or one.caption in one.orders
    assert len(told) == len(one.orders) > 4 and all(text.startswith("thing, ") for text in told)
    assert {tuple(sorted(text.split(", "))) for text in told} == {tuple(sorted(one.caption.split(", ")))}
    paths = cache.Paths([], [[Path(f"{number}.npz") for number in range(len(one.texts))]], {})
    assert {text for text, _ in cache.missing_texts([one], paths)} == set(one.texts)


def test_a_lora_to_begin_with_is_read_with_kohyas_names_and_with_diffusers(work, data, plain):
    files = {"diffusers": plain / "tiny.safetensors", "kohya": work["folder"] / "kohya.safetensors"}
    family = families.of(work["model"])
    own = {name.removeprefix(family.prefix): value for name, value in load_file(files["diffusers"]).items()}
    for name, value in own.items():
        own[name] = value * 4 if ".lora_B." in name else value  # the file's has alpha / rank in it
    files["kohya"].write_bytes(lora.to_file(own, lora.KOHYA, 0.25, None, {}))
    found = []
    for name, file in files.items():
        folder = run(work, data, f"from-{name}", max_train_steps=1, network_weights=file, learning_rate=1e-30)
        found.append(load_file(folder / "tiny.safetensors"))
    given = load_file(plain / "tiny.safetensors").items()
    assert all(torch.allclose(one[name], value, atol=1e-7) for one in found for name, value in given)
    state = plain / "tiny-step00000004-state"
    folder = run(work, data, "from-gone", resume=state, network_weights=work["folder"] / "gone.safetensors")
    assert sha(folder / "tiny.safetensors") == sha(plain / "tiny.safetensors"), "a resume does not need the file"
    message = r"\d of this run's 1 weights are not in it in this size, such as x.lora_A.weight; use a LoRA of the same"
    with pytest.raises(TrainError, match=message):
        lora.begin_with({"x.lora_A.weight": torch.zeros(8, 64)}, str(files["kohya"]), 1.0)
