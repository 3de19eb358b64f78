"""Every family on a tiny model of its real classes: it resumes exactly, samples, and its LoRA works in diffusers."""

import json
from types import SimpleNamespace
from unittest import mock

import pytest
import tiny_pipelines
import torch
from flux_parts import CPU, loaded, no_tick
from safetensors.torch import load_file, save_file
from trainer_helpers import flags, images, make_config, sha, train, trained

from guards.heartbeat import Heartbeat
from trainer import cache, families, flow, imports, lora, models, samples, setup
from trainer.arguments import parse
from trainer.errors import TrainError
from trainer.families import common

imports.heavy()
import diffusers  # noqa: E402 - after `heavy`

OTHERS = sorted(tiny_pipelines.PIPELINES)  # FLUX.1 is killed in test_states.py
PIPELINES = ["FluxPipeline", *OTHERS]
PROMPTS = "a thing --w 64 --h 64 --s 1 --l 3 --n bad\na longer thing --w 64 --h 32 --s 1\n"


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    """The tiny model of a pipeline, made once."""
    folder = tmp_path_factory.mktemp("families")
    (folder / "FluxPipeline").symlink_to(model)

    def of(pipeline):
        found = folder / pipeline
        return found if found.is_dir() else tiny_pipelines.make(pipeline, found)

    return of


def linked(model, folder, *without):
    """Give a folder the files and parts of a model, but for some."""
    for part in model.iterdir():
        if part.name not in without:
            (folder / part.name).symlink_to(part)


@pytest.fixture(scope="module")
def data(work):
    """Batches of two images whose captions differ in length."""
    (work["folder"] / "prompts.txt").write_text(PROMPTS, encoding="utf-8")
    (work["images"] / "1.txt").write_text("a thing whose caption is much longer than that of the others", "utf-8")
    return make_config(work["folder"] / "two.toml", work["images"], batch_size=2)


@pytest.mark.parametrize("pipeline", OTHERS)
def test_a_run_that_is_killed_gives_the_bytes_of_one_that_is_not(work, data, made, pipeline):
    """Killed in the middle of its second epoch."""
    mine = work | {"model": made(pipeline), "config": data}
    settings = {"max_train_steps": 8, "save_every_n_steps": 2, "gradient_checkpointing": True}
    prompts = {"sample_prompts": work["folder"] / "prompts.txt", "sample_every_n_steps": 8}
    whole = trained(mine, f"{pipeline}-whole", **settings, **prompts)
    assert len(images(whole)) == 2
    killed, done = train(mine, f"{pipeline}-killed", "kill@7+0", **settings)
    assert done.returncode == -9
    trained(mine, killed.name, resume=max(killed.glob("*-state")), **settings)
    assert sha(killed / "tiny.safetensors") == sha(whole / "tiny.safetensors")


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_its_lora_does_in_diffusers_what_it_did_here(made, pipeline, tmp_path):
    model, args = made(pipeline), parse(flags("m", "d", "o"))
    family, (ours, parameters) = families.of(model), loaded(model, alpha=2.0)
    for number, (name, weight) in enumerate(sorted(parameters.items())):
        if ".lora_B." in name:  # zero until it is trained
            weight.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(number))
    (tmp_path / "x.safetensors").write_bytes(lora.to_file(parameters, family.prefix, 2.0 / 4, None, {}))
    pipe = getattr(diffusers, pipeline).from_pretrained(model)
    theirs = getattr(pipe, family.denoiser).eval()
    batch = a_batch(pipe, family, args)
    with torch.no_grad():
        before = flow.loss_of(args, family, theirs, batch, 3, CPU, torch.float32)
        here = flow.loss_of(args, family, ours.eval(), batch, 3, CPU, torch.float32)
        pipe.load_lora_weights(tmp_path, weight_name="x.safetensors")
        there = flow.loss_of(args, family, theirs, batch, 3, CPU, torch.float32)
    assert there.item() == pytest.approx(here.item(), rel=1e-6)
    assert abs(before.item() - here.item()) > 1e-4
    ours.enable_gradient_checkpointing()
    checkpointed = flow.loss_of(args, family, ours, batch, 3, CPU, torch.float32)
    assert checkpointed.item() == pytest.approx(here.item(), rel=1e-6)


def test_a_lora_of_sdxl_is_begun_with_under_the_names_of_sd_scripts_and_of_older_versions(made, tmp_path):
    """sd-scripts has the names of Stability's code: input_blocks, middle_block, output_blocks."""
    parameters = loaded(made("StableDiffusionXLPipeline"), alpha=2.0)[1]
    file = tmp_path / "theirs.safetensors"
    file.write_bytes(lora.to_file(parameters, lora.KOHYA, 2.0 / 4, None, {}))
    theirs = load_file(file) | {"lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha": torch.tensor(4.0)}
    wanted = {name: weight.detach().clone() for name, weight in parameters.items()}
    older = {lora.kohya_name(name): value * (0.5 if "_B" in name else 1) for name, value in wanted.items()}
    for tensors in (theirs, older):
        save_file(tensors, file)
        for weight in parameters.values():
            weight.data.zero_()
        lora.begin_with(parameters, file, 2.0 / 4)
        assert all(torch.equal(weight, wanted[name]) for name, weight in parameters.items())


@pytest.mark.parametrize(("pipeline", "limit"), [*zip(PIPELINES, (64, 64, 500, 1019, 64, 77, 504), strict=True)])
def test_captions_that_are_longer_than_the_model_reads_are_reported(made, pipeline, limit, tmp_path, capsys):
    model, args = made(pipeline), parse(flags("m", "d", "o"))
    family = families.of(model)
    args.t5_tokens = models.t5_tokens(model, family, None if limit == 64 else 16)  # what has no T5 ignores it
    texts = [("a thing", tmp_path / "1.npz"), ("a thing, " * 120, tmp_path / "2.npz")]
    cache.encode_texts(texts, model, family, args, torch.float32, CPU, Heartbeat(None))
    assert f"1 of 2 texts are longer than {limit} tokens; the model gets no more" in capsys.readouterr().out


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_what_is_downloaded_of_a_model_encodes_and_is_like_all_of_it(made, pipeline, tmp_path):
    model, args = made(pipeline), parse(flags("m", "d", "o"))
    family, args.t5_tokens = families.of(model), 16
    names = [path.relative_to(model).as_posix() for path in sorted(model.rglob("*")) if path.is_file()]
    for name in models.wanted(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(model / name)
    (tmp_path / family.denoiser / ".DS_Store").write_bytes(b"of a file manager")
    (tmp_path / family.denoiser / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"of another program")
    texts = []
    for folder in (model, tmp_path):
        file = tmp_path / f"{len(texts)}.npz"
        cache.encode_texts([("a thing", file)], folder, family, args, torch.float32, CPU, Heartbeat(None))
        texts.append(cache.load(file))
    assert texts[0].keys() == texts[1].keys() and all(torch.equal(texts[0][key], texts[1][key]) for key in texts[0])
    parts = ["vae", family.denoiser, *cache.text_parts(model)]
    assert models.fingerprint(tmp_path, *parts) == models.fingerprint(model, *parts)


def test_a_configuration_of_flux_that_says_nothing_of_guidance_is_without_it(model):
    assert families.of(model).t5_tokens({}) == 256, "as diffusers' own default"


def test_two_families_with_one_text_encoder_do_not_share_the_texts_that_it_encoded(made, tmp_path):
    """Z-Image and FLUX.2 klein 4B both have Qwen3 4B, which a user may keep once; they take other layers of it."""
    z_image, shared = made("ZImagePipeline"), ("text_encoder", "tokenizer")
    linked(made("Flux2KleinPipeline"), tmp_path, *shared)
    for part in shared:
        (tmp_path / part).symlink_to(z_image / part)
    args = parse(flags("m", "d", tmp_path))
    args.t5_tokens = 0
    dtypes, beat = (torch.float32, torch.float32), Heartbeat(None)
    found = [cache.plan([], ["a"], model, tmp_path, args, dtypes, beat, print).prompts for model in (z_image, tmp_path)]
    assert found[0] != found[1]


@pytest.mark.parametrize("distilled", [True, False])
def test_a_distilled_model_draws_its_samples_without_classifier_free_guidance(made, distilled, tmp_path):
    model = made("Flux2KleinPipeline")
    linked(model, tmp_path, "model_index.json")
    index = json.loads((model / "model_index.json").read_text()) | {"is_distilled": distilled}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    pipe = models.pipeline(tmp_path, device=CPU)
    pipe._guidance_scale = 4.0
    assert pipe.do_classifier_free_guidance == (not distilled)


def test_a_model_that_predicts_velocity_is_trained_and_sampled_so(made, tmp_path):
    model = made("StableDiffusionXLPipeline")
    family = families.of(model)
    linked(model, tmp_path, "scheduler")
    diffusers.EulerDiscreteScheduler(prediction_type="v_prediction").save_pretrained(tmp_path / "scheduler")
    with pytest.raises(TrainError, match="predicts velocity, as its scheduler says; add --v_parameterization"):
        setup.check_family(parse(flags("m", "d", "o")), family, tmp_path)
    args = parse(flags("m", "d", "o", v_parameterization=True))
    sampler = samples.Sampler([], None, model, family, args, CPU, (), print)
    assert sampler.scheduler(samples.Prompt(0, "a thing", 7)).config.prediction_type == "v_prediction"


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_without_a_flag_the_prediction_is_that_of_kohyas_trainer_for_the_family(made, pipeline, capsys):
    model, arguments = made(pipeline), flags("m", "d", "o", v_parameterization=pipeline == "StableDiffusionXLPipeline")
    at = arguments.index("--model_prediction_type")
    args = parse([*arguments[:at], *arguments[at + 2 :], "--weighting_scheme", "cosmap"])
    setup.check_family(args, families.of(model), model)
    expected = "sigma_scaled" if pipeline in ("FluxPipeline", "ChromaPipeline") else "raw"
    assert args.model_prediction_type == expected
    assert ("--weighting_scheme cosmap does nothing" in capsys.readouterr().out) == (expected == "raw")


def a_batch(pipe, family, args):
    """One image, wider than high, and one text, encoded by the parts of a pipeline."""
    args.t5_tokens = 16
    with torch.no_grad():
        text = family.encode(pipe, "a thing", args)
        latents = family.latents(pipe.vae, torch.linspace(-1, 1, 3 * 64 * 96).view(1, 3, 64, 96))
    sizes = torch.tensor([[64, 96, 0, 0, 64, 96]])
    return {"latents": latents, "sizes": sizes, **{key: value[None] for key, value in text.items()}}


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_prediction_is_the_pipelines_own(made, pipeline):
    """What the pipeline gives its scheduler in its first step, from the same noise."""
    model, args = made(pipeline), parse(flags("m", "d", "o"))
    family = families.of(model)
    pipe = getattr(diffusers, pipeline).from_pretrained(model)
    batch = a_batch(pipe, family, args)
    noise = torch.randn(batch["latents"].shape, generator=torch.Generator().manual_seed(5))
    prompt = SimpleNamespace(cfg=1.0, guidance=1.0, width=96, height=64)
    text = {key: value for key, value in batch.items() if key not in ("latents", "sizes")}
    kwargs = {"height": 64, "width": 96, "num_inference_steps": 1, "output_type": "latent"}
    kwargs |= {"generator": torch.Generator().manual_seed(5), **family.sample(text, None, prompt, args)}
    with torch.no_grad(), mock.patch.object(pipe.scheduler, "step", wraps=pipe.scheduler.step) as step:
        pipe(**kwargs)
        predicted, t, start = step.call_args_list[0].args
        if family.key == "sdxl":
            scaled = pipe.scheduler.init_noise_sigma
            kept = 1 / (1 + scaled**2) ** 0.5
            found = family.predict(pipe.unet, start * kept, t.reshape(1).long(), batch, args)
        else:
            found = family.predict(pipe.transformer, noise, t.reshape(1) / 1000, batch, args)
    if family.key == "flux2_klein":
        predicted = predicted.permute(0, 2, 1).reshape(found.shape)
    elif family.key in ("flux", "chroma", "qwen_image"):
        predicted = common.unpack(predicted, 8, 12)
    assert torch.allclose(predicted.float(), found, atol=1e-5)


@pytest.mark.parametrize(
    ("pipeline", "part"),
    [
        ("ZImagePipeline", "t_embedder"),
        ("StableDiffusion3Pipeline", "time_text_embed.time_proj"),
        ("StableDiffusionXLPipeline", "add_time_proj"),
    ],
)
def test_noise_levels_and_sizes_are_not_rounded_in_16_bits(made, pipeline, part):
    """bfloat16 has 8 bits: of two levels near 0.999, or two sizes near 3,000 pixels, it makes one."""
    model, level, given = made(pipeline), torch.tensor([0.0123]), []
    family, args = families.of(model), parse(flags("m", "d", "o"))
    batch = a_batch(getattr(diffusers, pipeline).from_pretrained(model), family, args)
    batch["sizes"] = torch.tensor([[3001, 1999, 7, 0, 64, 96]])
    ours = models.load_denoiser(model, family, torch.bfloat16, CPU, "", no_tick)
    ours.get_submodule(part).register_forward_pre_hook(lambda _, values: given.extend(values[0].tolist()))
    with torch.no_grad():
        family.predict(ours, batch["latents"], level, flow.on_device(batch, CPU, torch.bfloat16), args)
    exact = {"z_image": 1000 * (1 - level), "sd3": 1000 * level, "sdxl": batch["sizes"].flatten()}[family.key]
    assert given == pytest.approx(exact.tolist())
