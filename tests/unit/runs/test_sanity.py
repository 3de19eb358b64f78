"""Values are judged before Start: impossible or absurd settings are refused or explained, sensible ones pass.

Both lists go through `form.review`, the function that Start uses.
"""

import sys
from pathlib import Path

import pytest

import presets
import runs
from runs.machine import Machine
from runs.sanity import IMPOSSIBLE, WARNING, facts, holds, judge
from runs.spec import MOST
from ui.new import form

RTX_3060 = Machine("NVIDIA GeForce RTX 3060", 12.0, True, 31.2, 220.0)
RTX_4090 = Machine("NVIDIA GeForce RTX 4090", 24.0, True, 62.7, 400.0)
H100 = Machine("NVIDIA H100 80GB HBM3", 79.6, True, 251.0, 2000.0)
NO_GPU = Machine("", None, False, 31.2, 220.0)
CPU_TORCH = Machine("NVIDIA GeForce RTX 4090", 24.0, False, 62.7, 400.0)
LITTLE_MEMORY = Machine("NVIDIA GeForce RTX 3060", 12.0, True, 8.0, 220.0)
FULL_DISK = Machine("NVIDIA GeForce RTX 4090", 24.0, True, 62.7, 0.05)
PHOTO, THUMBNAIL = (1024, 1024), (200, 150)

# The options of sd-scripts that the lists use, with their types in its parser (library/train_util.py, flux_train_network.py).
OPTIONS = """
bool: fp8_base split_mode cache_latents no_half_vae full_bf16 apply_t5_attn_mask network_train_unet_only highvram shuffle_caption
bool: persistent_data_loader_workers fused_backward_pass masked_loss sdpa bucket_no_upscale sample_at_first
int: t5xxl_max_token_length blocks_to_swap lr_scheduler_num_cycles vae_batch_size text_encoder_batch_size ddp_timeout
int: validation_seed validate_every_n_steps validate_every_n_epochs sample_every_n_epochs min_bucket_reso max_bucket_reso bucket_reso_steps clip_skip
float: noise_offset network_dropout caption_dropout_rate caption_tag_dropout_rate min_snr_gamma max_grad_norm guidance_scale
float: discrete_flow_shift sigmoid_scale unet_lr ip_noise_gamma prior_loss_weight scale_weight_norms lr_scheduler_power
float: lr_warmup_steps text_encoder_lr logit_mean logit_std mode_scale validation_split
str: optimizer_type lr_scheduler pretrained_model_name_or_path clip_l t5xxl ae
list: optimizer_args network_args lr_scheduler_args
choice: timestep_sampling=sigma,uniform,sigmoid,shift,flux_shift loss_type=l1,l2,huber,smooth_l1
choice: model_prediction_type=raw,additive,sigma_scaled weighting_scheme=sigma_sqrt,logit_normal,mode,cosmap,none,uniform
"""


def _parser() -> str:
    lines = []
    for line in OPTIONS.strip().splitlines():
        kind, _, names = line.partition(": ")
        for name in names.split():
            name, _, choices = name.partition("=")
            how = {"bool": 'action="store_true"', "list": 'nargs="*"', "choice": f"choices={choices.split(',')}"}
            lines.append(f'    parser.add_argument("--{name}", {how.get(kind, f"type={kind}")})')
    head = ["import argparse", "def setup_parser():", "    parser = argparse.ArgumentParser()"]
    return "\n".join([*head, *lines, "    return parser"])


@pytest.fixture
def checkout(data, tmp_path, monkeypatch) -> Path:
    """A data folder with a base model whose files are there, and a small checkout in place of sd-scripts."""
    folder = tmp_path / "sd-scripts"
    (folder / "library").mkdir(parents=True)
    (folder / "flux_train_network.py").write_text(_parser(), encoding="utf-8")
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


def case(what: str, field: str, machine: Machine | None = RTX_4090, images: int = 20, size=PHOTO, **given):
    return pytest.param(field, given, machine, images, size, id=what)


# What must not start silently, and the field beside which the page says so.
ABSURD = [
    # memory that no machine has, or that this one lacks
    case("rank of a billion", "rank", rank=1_000_000_000),
    case("rank of 1,024", "rank", rank=1024),
    case("batch of 10,000", "batch_size", batch_size=10_000),
    case("batch above the images", "batch_size", batch_size=64, repeats=1, machine=H100),
    case("4,096 pixels", "resolution", resolution=4096, machine=H100),
    case("64 pixels", "resolution", resolution=64),
    case("thumbnails enlarged to 1,024", "resolution", resolution=1024, size=THUMBNAIL),
    case("float32 weights on 24 GB", "tier", mixed_precision="no"),
    case("20 GB setting on a 12 GB GPU", "tier", machine=RTX_3060),
    case("12 GB setting at 1,536 pixels", "tier", machine=RTX_3060, tier="12G", resolution=1536),
    case("no GPU", "model", machine=NO_GPU),
    case("PyTorch without CUDA", "model", machine=CPU_TORCH),
    case("8 GB of memory", "model", machine=LITTLE_MEMORY, tier="12G"),
    case("fp16", "mixed_precision", mixed_precision="fp16"),
    case("a disk with 50 MB", "keep_states", machine=FULL_DISK, rank=64),
    case("1,000 GPUs", "gpus", gpus=1000),
    case("a spend limit without a price", "spend_limit", spend_limit="5"),
    case("two GPUs where there is none", "gpus", gpus=2, machine=NO_GPU),
    case("a million checkpoints", "keep_states", keep_states=1_000_000, rank=64, save_every_n_steps="1"),
    case("500 machines", "nodes", nodes=500),
    case("one image used 8,000 times", "epochs", images=1, repeats=500),
    case("learning rate 1e6", "learning_rate", learning_rate="1e6"),
    case("a million sampling steps", "sample_steps", sample_steps=1_000_000),
    case("a sample of 9,000 pixels", "prompts", prompts="a cat --w 9000 --h 9000"),
    case("100 loader workers", "workers", workers=100),
    # time
    case("2 billion steps", "epochs", repeats=1_000_000, epochs=100),
    case("300 images at the defaults", "epochs", images=300),
    case("a hundred million maximum steps", "epochs", max_train_steps="100000000"),
    case("fewer steps than images", "max_train_steps", max_train_steps="5"),
    case("a share that holds out no image", "validation_split", images=5, validation_split="0.05"),
    case("half of one image held out", "validation_split", images=1, validation_split="0.5", repeats=20),
    case("no validation in between", "validate_every_n_steps", validation_split="0.1", validate_every_n_steps="99999"),
    case("60 steps", "epochs", repeats=1, epochs=3),
    case("a million batches per step", "gradient_accumulation", gradient_accumulation=1_000_000),
    case("more batches per step than an epoch has", "gradient_accumulation", gradient_accumulation=500),
    # learning
    case("learning rate 5", "learning_rate", learning_rate="5"),
    case("learning rate 1e-9", "learning_rate", learning_rate="1e-9"),
    case("AdamW's rate with Prodigy", "learning_rate", flags="optimizer_type=prodigy", learning_rate="0.0001"),
    case("Prodigy's rate with AdamW", "learning_rate", flags="optimizer_type=AdamW", learning_rate="1"),
    case("a rate of the transformer alone", "learning_rate", flags="unet_lr=3"),
    case("alpha 1,000 at rank 4", "alpha", alpha="1000"),
    case("alpha 0.001 at rank 16", "alpha", rank=16, alpha="0.001"),
    # saving and samples
    case("LoRAs saved after the end", "save_every_n_epochs", save_every_n_epochs=50),
    case("checkpoints saved after the end", "save_every_n_steps", save_every_n_steps="5000"),
    case("no checkpoint at all", "save_every_n_steps", save_every_n_steps="0", save_every_n_epochs=0),
    case("a checkpoint every step", "save_every_n_steps", save_every_n_steps="1"),
    case("samples after the end", "sample_every_n_steps", sample_every_n_steps="9000"),
    case("samples without a prompt", "prompts", sample_every_n_steps="100", trigger=""),
    case("a sample every step", "sample_every_n_steps", sample_every_n_steps="1", prompts="a cat\na dog"),
    case("500 sampling steps", "sample_steps", sample_steps=500, sample_every_n_steps="1000"),
    case("prompts with samples off", "prompts", prompts="a cat", sample_every_n_steps="0"),
    case("a prompt of 2,000 words", "prompts", prompts="cat " * 2000),
    case("a trigger of 50 words", "trigger", trigger="cat " * 50),
    # the machine, and extra options
    case("a billion loader workers", "workers", workers=1_000_000_000),
    case("control images that are not there", "control_dir", model="qwen-image-edit", backend="musubi", control_dir="/none/at/all"),
    case("an optimizer that does not exist", "flags", flags="optimizer_type=AdamWW"),
    case("an option that does not exist", "flags", flags="noise_ofset=0.05"),
    case("dropout of 3", "flags", flags="network_dropout=3"),
    case("more captions dropped than there are", "flags", flags="caption_dropout_rate=50"),
    case("optimizer arguments that are no numbers", "flags", flags='optimizer_args=["weight_decay=much"]'),
    case("a schedule that does not exist", "flags", flags="lr_scheduler=cosinus"),
    case("block swap, which is known to hang", "flags", flags="blocks_to_swap=20"),
    case("a time shift of 1,000", "flags", flags="discrete_flow_shift=1000"),
]  # fmt: skip

FLUXGYM = "github.com/cocktailpeanut/fluxgym app.py"
KOHYA = "sd-scripts docs/flux_train_network.md and docs/train_network.md"
AI_TOOLKIT = "github.com/ostris/ai-toolkit config/examples/train_lora_flux_24gb.yaml"
CIVITAI = "civitai.com on-site trainer, FLUX defaults"
ONETRAINER = "github.com/Nerogar/OneTrainer training_presets/#flux LoRA.json"
REPLICATE = "replicate.com/ostris/flux-dev-lora-trainer defaults"
SIMPLETUNER = "github.com/bghira/SimpleTuner documentation/quickstart/FLUX.md"


def good(source: str, what: str, machine: Machine | None = RTX_4090, images: int = 20, size=PHOTO, **given):
    return pytest.param(given, machine, images, size, id=f"{what} ({source.split()[0].removeprefix('github.com/')})")


# Settings that people use. The learning rates, ranks and lengths are those of the sources; images are 10 to 200 photographs.
SENSIBLE = [
    good(FLUXGYM, "defaults, 24 GB"),
    good(FLUXGYM, "12 GB", machine=RTX_3060, tier="12G"),
    good(FLUXGYM, "built-in trainer", backend="diffusers"),
    good(FLUXGYM, "built-in trainer, 12 GB", backend="diffusers", machine=RTX_3060, tier="12G"),
    good(FLUXGYM, "samples every 250 steps", sample_every_n_steps="250", prompts="ohwx cat on a beach\nohwx cat, oil painting"),
    good(FLUXGYM, "rank 16", rank=16, alpha="16"),
    good(FLUXGYM, "1,024 pixels on 24 GB", resolution=1024),
    good(FLUXGYM, "no trigger word", trigger="", sample_every_n_steps="0"),
    good(FLUXGYM, "tiny model without a GPU", machine=NO_GPU, model="tiny-flux", backend="diffusers", resolution=64,
         mixed_precision="no", sample_steps=2),
    good(FLUXGYM, "machine not known", machine=None),
    good(FLUXGYM, "no images yet", images=0),
    good(KOHYA, "network_dim 4 and 1e-4", rank=4, alpha="1", learning_rate="1e-4"),
    good(KOHYA, "network_dim 128, alpha 1", rank=128, alpha="1", learning_rate="1e-4"),
    good(KOHYA, "Adafactor", flags="optimizer_type=Adafactor\noptimizer_args=relative_step=False scale_parameter=False",
         learning_rate="4e-4"),
    good(KOHYA, "Lion", flags="optimizer_type=Lion8bit", learning_rate="3e-5"),
    good(KOHYA, "Prodigy", flags='optimizer_type=Prodigy\noptimizer_args=["decouple=True", "weight_decay=0.01"]',
         learning_rate="1"),
    good(KOHYA, "a class of a library", flags="optimizer_type=bitsandbytes.optim.AdEMAMix8bit", learning_rate="1e-4"),
    good(KOHYA, "schedule-free", flags="optimizer_type=AdamWScheduleFree", learning_rate="2e-4"),
    good(KOHYA, "warm-up", flags="lr_scheduler=constant_with_warmup\nlr_warmup_steps=100"),
    good(KOHYA, "noise offset", flags="noise_offset=0.05"),
    good(KOHYA, "dropout", flags="network_dropout=0.1\ncaption_dropout_rate=0.1"),
    good(KOHYA, "flux shift", flags="timestep_sampling=flux_shift\nguidance_scale=1.0"),
    good(KOHYA, "single blocks", flags="network_args=train_blocks=single", tier="16G"),
    good(KOHYA, "longer captions", flags="t5xxl_max_token_length=512\napply_t5_attn_mask=true"),
    good(KOHYA, "batch of 4", batch_size=4, machine=H100, repeats=20),
    good(KOHYA, "samples each epoch", sample_every_n_steps="0", flags="sample_every_n_epochs=1\nsample_at_first=true",
         prompts="a cat --w 1024 --h 1024 --d 42 --s 20"),
    good(KOHYA, "200 images", images=200, repeats=1, epochs=10),
    good(AI_TOOLKIT, "2,000 steps, rank 16", rank=16, alpha="16", learning_rate="1e-4", max_train_steps="2000",
         sample_every_n_steps="250", prompts="a\nb\nc\nd\ne", sample_steps=20, save_every_n_steps="250"),
    good(CIVITAI, "rank 2, alpha 16", rank=2, alpha="16", learning_rate="5e-4", epochs=5, repeats=20),
    good(CIVITAI, "1,024 pixels, batch 2", resolution=1024, batch_size=2, machine=H100, learning_rate="5e-4"),
    good(ONETRAINER, "3e-4", rank=16, alpha="1", learning_rate="3e-4", resolution=768, epochs=100, repeats=1,
         save_every_n_epochs=10),
    good(REPLICATE, "a rented machine with a store and a limit", learning_rate="4e-4", store="s3://bucket/runs",
         price_per_hour="0.4", spend_limit="5"),
    good(REPLICATE, "8 images", images=8, max_train_steps="1000", rank=16, alpha="16", learning_rate="4e-4"),
    good(SIMPLETUNER, "gradient accumulation 4", gradient_accumulation=4, learning_rate="1e-4"),
    good(SIMPLETUNER, "512-pixel photographs", size=(512, 640), learning_rate="1e-4"),
    good(SIMPLETUNER, "a tenth held out", validation_split="0.1", validate_every_n_steps="50", learning_rate="1e-4"),
]  # fmt: skip


def review(given: dict, machine: Machine | None, images: int, size: tuple[int, int]) -> form.Review:
    return form.review(values(**given), images, machine, [size] * images)


@pytest.mark.parametrize(("field", "given", "machine", "images", "size"), ABSURD)
def test_an_absurd_setting_does_not_start_silently(checkout, field, given, machine, images, size):
    found = review(given, machine, images, size)
    shown = found.marks()
    assert field in shown, (found.faults, found.warnings)
    for kind, sentence in shown[field]:
        assert kind in ("bad", "warn") and "{" not in sentence and not sentence.endswith(".")


@pytest.mark.parametrize(("given", "machine", "images", "size"), SENSIBLE)
def test_a_sensible_setting_is_neither_refused_nor_doubted(checkout, given, machine, images, size):
    found = review(given, machine, images, size)
    assert found.spec is not None
    assert (found.faults, found.warnings) == ((), ())


def test_what_can_never_work_is_refused_and_the_rest_explained(checkout):
    for given, field in (({"rank": 10**9}, "rank"), ({"workers": 10**9}, "workers"), ({"epochs": 10**12}, "epochs")):
        assert field in {fault.field for fault in review(given, RTX_4090, 20, PHOTO).faults}
    for given, field in (({"learning_rate": "5"}, "learning_rate"), ({"mixed_precision": "fp16"}, "mixed_precision")):
        found = review(given, RTX_4090, 20, PHOTO)
        assert found.faults == () and field in {warning.field for warning in found.warnings}


def test_impossible_values_come_first_and_every_rule_names_a_fact():
    spec = runs.make({"name": "x", "rank": 10**9, "learning_rate": 5, "backend": "diffusers"})
    severities = [finding.severity for finding in judge(spec, 20, NO_GPU)]
    assert severities == sorted(severities) and {*severities} == {IMPOSSIBLE, WARNING}
    full = runs.make({"name": "x", "save_every_n_steps": 10, "sample_every_n_steps": 10, "prompts": ["a"]})
    known = facts(full, 20, RTX_4090, [PHOTO])
    for rule in presets.sanity()["rule"]:
        conditions = {**rule.get("above", {}), **rule.get("below", {}), **rule.get("is", {})}
        assert conditions and set(conditions) <= set(known), rule
        assert rule["severity"] in (IMPOSSIBLE, WARNING)
        assert rule["field"] in {*runs.RunSpec.model_fields, "model-memory"}
        rule["message"].format_map(known)


def test_a_fact_that_is_not_known_holds_never():
    assert not holds({"above": {"steps": 0}}, {}) and not holds({"below": {"steps": 1}}, {})
    assert not holds({"is": {"cuda": False}}, {}) and holds({"is": {"cuda": False}}, {"cuda": False})


def test_the_largest_counts_do_not_break_the_computation():
    most = {"rank": MOST, "repeats": MOST, "epochs": MOST, "batch_size": MOST, "keep_states": MOST, "gpus": MOST}
    spec = runs.make({"name": "x", "alpha": 1.7e308, "learning_rate": 1.7e308, **most})
    assert any(finding.severity == IMPOSSIBLE for finding in judge(spec, 10**6, FULL_DISK, [(1, 1)]))
    least = runs.make({"name": "x", "alpha": 5e-324, "learning_rate": 5e-324, "resolution": 32})
    assert judge(least, 1, None)
