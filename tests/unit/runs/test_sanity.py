"""Values are judged before Start: impossible or absurd settings are refused or explained, sensible ones pass.

All but the rules one by one go through `form.review`, the function that Start uses.
"""

import sys

import pytest

import presets
import runs
from runs.machine import Machine
from runs.sanity import IMPOSSIBLE, WARNING, Finding, facts, holds, judge
from runs.spec import MOST
from ui.new import form

RTX_3060 = Machine("NVIDIA GeForce RTX 3060", 12.0, True, 220.0)
RTX_4090 = Machine("NVIDIA GeForce RTX 4090", 24.0, True, 400.0, vram_free_gb=24.0)
H100 = Machine("NVIDIA H100 80GB HBM3", 79.6, True, 2000.0)
NO_GPU = Machine("", None, False, 220.0)
CPU_TORCH = Machine("NVIDIA GeForce RTX 4090", 24.0, False, 400.0)
BUSY_GPU = Machine("NVIDIA GeForce RTX 4090", 24.0, True, 400.0, vram_free_gb=15.0)
FULL_DISK = Machine("NVIDIA GeForce RTX 4090", 24.0, True, 0.05)

# The options of sd-scripts in the lists, with their types in its parser (library/train_util.py, flux_train_network.py).
OPTIONS = {
    "optimizer_type": "type=str", "optimizer_args": 'nargs="*"', "unet_lr": "type=float",
    "lr_warmup_steps": "type=float", "lr_scheduler": "type=str", "lr_scheduler_type": "type=str",
    "blocks_to_swap": "type=int", "sample_every_n_epochs": "type=int", "sample_at_first": 'action="store_true"',
}  # fmt: skip
ADDED = [f'    parser.add_argument("--{name}", {kind})' for name, kind in OPTIONS.items()]
PARSER = "import argparse\ndef setup_parser():\n    parser = argparse.ArgumentParser()\n{}\n    return parser\n"


@pytest.fixture
def checkout(data, tmp_path, monkeypatch):
    """A data folder with a base model whose files are there, and a small checkout in place of sd-scripts."""
    folder = tmp_path / "sd-scripts"
    (folder / "library").mkdir(parents=True)
    (folder / "flux_train_network.py").write_text(PARSER.format("\n".join(ADDED)), encoding="utf-8")
    monkeypatch.setenv("SD_SCRIPTS_DIR", str(folder))
    monkeypatch.setenv("ACCELERATE", sys.executable)  # a launcher that is there
    (data / "models").mkdir()
    for name in presets.models()["flux-dev"]["files"].values():
        (data / "models" / name).write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    monkeypatch.setattr("runs.weights._diffusers", lambda spec, name, ask: [])  # the model's folder is complete
    return folder


def values(**given) -> dict:
    """Values of the form: a usual run on FLUX.1-dev with sd-scripts."""
    usual = {"name": "my cat", "trigger": "ohwx cat", "model": "flux-dev", "backend": "sd-scripts", "tier": "20G"}
    return {**form.defaults(), **usual, **given}


def case(what: str, field: str, machine: Machine | None = RTX_4090, images: int = 20, **given):
    return pytest.param(field, given, machine, images, id=what)


# What must not start silently: (the beginning of the message of a rule of presets/sanity.toml, settings); one a rule.
RULES = [
    case("The run has {steps_text}. At 10", "epochs", repeats=1_000_000, epochs=100),
    case("The run has {steps_text}, and each", "epochs", images=300, epochs=120),
    case("The run has only", "epochs", repeats=1, epochs=3),
    case("Learning rate {rate:g} is {rate_share", "learning_rate", learning_rate="5"),
    case("The run needs about {memory_gb:.1f} GB of GPU memory. That", "tier", machine=RTX_3060),
    case("The run needs about {memory_gb:.1f} GB of GPU memory, and", "tier", machine=BUSY_GPU),
    case("The trainer's PyTorch", "model", machine=CPU_TORCH),
    case("No checkpoint", "save_every_n_steps", save_every_n_steps="5000"),
    case("The checkpoints and LoRAs", "keep_states", machine=FULL_DISK, rank=64),
    case("A share of", "validation_split", images=5, validation_split="0.05"),
    case("A spend limit", "spend_limit", spend_limit="5"),
    case("lr_warmup_steps: the", "extra", flags="lr_warmup_steps=20%"),
    case("blocks_to_swap", "extra", flags="blocks_to_swap=20"),
]  # fmt: skip

FLUXGYM = "github.com/cocktailpeanut/fluxgym app.py"
KOHYA = "sd-scripts docs/flux_train_network.md and docs/train_network.md"
AI_TOOLKIT = "github.com/ostris/ai-toolkit config/examples/train_lora_flux_24gb.yaml"
REPLICATE = "replicate.com/ostris/flux-dev-lora-trainer defaults"
SIMPLETUNER = "github.com/bghira/SimpleTuner documentation/quickstart/FLUX.md"


def good(source: str, what: str, machine: Machine | None = RTX_4090, images: int = 20, **given):
    return pytest.param(given, machine, images, id=f"{what} ({source.split()[0].removeprefix('github.com/')})")


# Settings that people use: learning rates, ranks and lengths are those of the sources; images are 20 photographs.
SENSIBLE = [
    good(FLUXGYM, "defaults, 24 GB"),
    good(FLUXGYM, "12 GB", machine=RTX_3060, tier="12G"),
    good(FLUXGYM, "built-in trainer, 12 GB", backend="diffusers", machine=RTX_3060, tier="12G"),
    good(FLUXGYM, "tiny model without a GPU", machine=NO_GPU, model="tiny-flux", backend="diffusers", resolution=64,
         mixed_precision="no", sample_steps=2),
    good(FLUXGYM, "machine not known", machine=None),
    good(KOHYA, "network_dim 128, alpha 1", rank=128, alpha="1", learning_rate="1e-4"),
    good(KOHYA, "Prodigy", flags='optimizer_type=Prodigy\noptimizer_args=["decouple=True", "weight_decay=0.01"]',
         learning_rate="1"),
    good(KOHYA, "D-Adaptation", flags="optimizer_type=DAdaptAdam", learning_rate="1"),
    good(KOHYA, "a warm-up", flags="lr_warmup_steps=100\nlr_scheduler=cosine"),
    good(KOHYA, "a warm-up of the optimizer's own", flags="lr_warmup_steps=9\noptimizer_type=AdamWScheduleFree",
         learning_rate="1e-4"),
    good(KOHYA, "batch of 4", batch_size=4, machine=H100, repeats=20),
    good(KOHYA, "samples each epoch", sample_every_n_steps="0", flags="sample_every_n_epochs=1\nsample_at_first=true",
         prompts="a cat --w 1024 --h 1024 --d 42 --s 20"),
    good(AI_TOOLKIT, "2,000 steps, rank 16", rank=16, alpha="16", learning_rate="1e-4", max_train_steps="2000",
         sample_every_n_steps="250", prompts="a\nb\nc\nd\ne", sample_steps=20, save_every_n_steps="250"),
    good(REPLICATE, "a rented machine with a store and a limit", learning_rate="4e-4", store="s3://bucket/runs",
         price_per_hour="0.4", spend_limit="5"),
    good(SIMPLETUNER, "a tenth held out", validation_split="0.1", validate_every_n_steps="50", learning_rate="1e-4"),
]  # fmt: skip


def test_what_a_field_or_an_option_cannot_be_does_not_start_silently(checkout):
    for field, given in (
        ("nodes", {"nodes": 500}),
        ("learning_rate", {"flags": "unet_lr=3"}),
        ("flags", {"flags": "optimizer_type=AdamWW"}),
        ("flags", {"flags": "lr_scheduler_type=CosineAnnealingLR\nlr_scheduler=cosine\nlr_warmup_steps=9"}),
        ("flags", {"flags": 'optimizer_args=["weight_decay=much"]'}),
    ):
        shown = form.review(values(**given), {"": 20}, RTX_4090).marks()[field]
        assert shown and {kind for kind, _ in shown} <= {"bad", "warn"}
        assert not any("{" in sentence or sentence.endswith(".") for _, sentence in shown)


@pytest.mark.parametrize("rule", presets.read_table("sanity.toml")["rule"], ids=lambda rule: rule["message"][:40])
def test_each_rule_is_met_by_its_settings(checkout, rule):
    [one] = [one for one in RULES if rule["message"].startswith(one.id)]
    field, given, machine, images = one.values
    spec, faults = form.parse(values(**given))
    known = facts(spec, {"": images}, machine)
    assert not faults and rule["field"] == field and rule["severity"] in (IMPOSSIBLE, WARNING) and holds(rule, known)
    expected = Finding(field, rule["message"].format_map(known), rule["severity"])
    assert expected in judge(spec, {"": images}, machine)


@pytest.mark.parametrize(("given", "machine", "images"), SENSIBLE)
def test_a_sensible_setting_is_neither_refused_nor_doubted(checkout, given, machine, images):
    found = form.review(values(**given), {"": images}, machine)
    assert found.spec is not None
    assert (found.faults, found.warnings) == ((), ())


def test_impossible_values_come_first_and_the_largest_counts_do_not_break_the_computation():
    most = {"repeats": MOST, "epochs": MOST, "batch_size": MOST, "keep_states": MOST, "spend_limit": 5}
    spec = runs.make({"name": "x", "alpha": 1.7e308, "learning_rate": 1.7e308, **most})
    severities = [finding.severity for finding in judge(spec, {"": 10**6}, FULL_DISK)]
    assert severities == sorted(severities) and {*severities} == {IMPOSSIBLE, WARNING}
    assert not holds({"above": {"steps": 0}}, {}) and not holds({"is": {"cuda": False}}, {}), "not known"
