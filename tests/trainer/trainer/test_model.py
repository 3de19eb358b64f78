"""The trainer's parts on a real (tiny) FLUX: loading, stored weights, halves, LoRA file, schedules, samples."""

import json
import re
import shutil
import threading
from argparse import Namespace

import pytest
from trainer_helpers import flags, sha

from guards import limits
from guards.heartbeat import Heartbeat
from trainer import flow, lora, models, optimizers, quantized, samples, streaming, tiny_flux
from trainer.arguments import parse
from trainer.errors import TrainError
from trainer.families import common
from trainer.families.flux import FAMILY

torch = pytest.importorskip("torch")
CPU = torch.device("cpu")


def no_tick(done, total):
    pass


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other make a small model slow where there are more threads than free processors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def arguments(**changed):
    return parse(flags("m", "d", "o", **changed))


def with_tokens(**changed):
    args = arguments(**changed)
    args.t5_tokens = 16
    return args


def load(model, kind=""):
    return models.load_denoiser(model, FAMILY, torch.float32, CPU, kind, no_tick)


def loss_of(args, transformer, batch, seed):
    return flow.loss_of(args, FAMILY, transformer, batch, seed, CPU, torch.float32)


def loaded(model, blocks="all", kind="", **lora_changed):
    transformer = load(model, kind)
    settings = {"rank": 4, "alpha": 1.0, "dropout": 0.0, "seed": 42, "cast_inputs": True, **lora_changed}
    return transformer, lora.add(transformer, blocks=FAMILY.blocks[blocks], **settings)


def a_batch(count=2, height=8, width=12, tokens=16):
    draw = torch.Generator().manual_seed(1)
    return {
        "latents": torch.randn(count, 16, height, width, generator=draw),
        "t5": torch.randn(count, tokens, 64, generator=draw),
        "clip": torch.randn(count, 32, generator=draw),
        "mask": torch.ones(count, tokens, dtype=torch.long),
    }


def steps(transformer, parameters, args, count=3):
    """`count` optimizer steps on one batch → their losses."""
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    out = []
    for step in range(count):
        loss = loss_of(args, transformer, a_batch(), step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out


def test_two_makers_at_once_make_one_model_and_always_the_same(tmp_path, monkeypatch, model):
    made, real = [], tiny_flux.make
    monkeypatch.setattr(tiny_flux, "make", lambda folder: (made.append(folder), real(folder)))
    makers = [threading.Thread(target=tiny_flux.ensure, args=(tmp_path / "tiny-flux",)) for _ in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(60)
    assert len(made) == 1
    files = [p.relative_to(tmp_path / "tiny-flux") for p in (tmp_path / "tiny-flux").rglob("*") if p.is_file()]
    assert len(files) > 5  # other tests keep a quantized copy in the model that they share
    assert [sha(tmp_path / "tiny-flux" / p) for p in files] == [sha(model / p) for p in files]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tiny-flux.lock", "tiny-flux"]


def test_the_transformer_is_that_of_diffusers(model):
    from diffusers import FluxTransformer2DModel

    ours = load(model)
    theirs = FluxTransformer2DModel.from_pretrained(model / "transformer").eval()
    args = arguments()
    with torch.no_grad():
        assert torch.equal(loss_of(args, ours, a_batch(), 1), loss_of(args, theirs, a_batch(), 1))


@pytest.mark.parametrize(("blocks", "layers"), [("double", 2 * 14), ("single", 4 * 6), ("all", 2 * 14 + 4 * 6)])
def test_the_lora_sits_on_every_matrix_of_the_selected_blocks(model, blocks, layers):
    _, parameters = loaded(model, blocks)
    assert len(parameters) == 2 * layers
    assert all(p.requires_grad and p.dtype == torch.float32 for p in parameters.values())


@pytest.mark.parametrize(
    ("kind", "bits", "most"),
    [("float8", 8, 0.05), ("float8_scaled", 8.3, 0.05), ("int8", 8.3, 0.02), ("nf4", 4.6, 0.15)],
)
def test_stored_blocks_are_small_and_train_nearly_the_same(model, kind, bits, most):
    args = arguments()
    original, small = loaded(model), loaded(model, kind=kind)
    layers = [m for m in small[0].modules() if isinstance(m, quantized.StoredLinear)]
    assert len(layers) == 2 * 14 + 4 * 6
    numbers = sum(layer.in_features * layer.out_features for layer in layers)
    kept = sum(t.nbytes for layer in layers for t in (layer.weight, layer.scales) if t is not None)
    assert 8 * kept / numbers < bits * 1.1
    assert small[0].x_embedder.weight.dtype == torch.float32
    first, second = steps(*original, args), steps(*small, args)
    assert first != second
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) < most
    assert all(torch.isfinite(p).all() for p in small[1].values())


@pytest.mark.parametrize("kind", quantized.KINDS)
def test_the_gradient_through_a_stored_matrix_is_that_of_its_value(kind):
    plain = torch.nn.Linear(64, 6).requires_grad_(False)
    small = torch.nn.Linear(64, 6).requires_grad_(False)
    small.bias.data = plain.bias.data.clone()
    stored, scales = quantized.store(plain.weight.data, kind)
    quantized.convert(small, stored, scales)
    plain.weight.data = quantized.restore(stored, scales, (6, 64), torch.float32)
    x = torch.randn(3, 64)
    gradients = []
    for layer in (plain, small):
        at = x.clone().requires_grad_(True)
        layer(at).square().sum().backward()
        gradients.append(at.grad)
    assert torch.allclose(*gradients)


@pytest.mark.parametrize("recompute", [False, True])
def test_split_mode_trains_what_plain_training_of_the_single_blocks_trains(model, recompute):
    args, results = arguments(), []
    for halves in (False, True):
        transformer, parameters = loaded(model, "single")
        if recompute:
            transformer.enable_gradient_checkpointing()
        if halves:
            streaming.split(transformer, FAMILY.halves, CPU)
        results.append((steps(transformer, parameters, args, 4), parameters))
    (plain, weights), (halved, others) = results
    assert plain == pytest.approx(halved, abs=1e-6)
    assert max((weights[name] - others[name]).abs().max().item() for name in weights) <= 1e-6
    assert any(weights[name].abs().max() > 0 for name in weights if "lora_B" in name)


ELSEWHERE = torch.device("cpu", 0)  # torch holds it for another device than "cpu": what is brought there is a copy


def away(streamer):
    """The groups whose weights are in their home."""
    pairs = enumerate(zip(streamer.parts, streamer.home, strict=True))
    return [n for n, (parts, home) in pairs if [p.data_ptr() for p in parts] == [h.data_ptr() for h in home]]


def test_a_step_brings_each_half_once_and_one_at_a_time(model, monkeypatch):
    transformer, parameters = loaded(model, "single")
    original = {name: p.clone() for name, p in transformer.named_parameters() if "lora_" not in name}
    streamer = streaming.split(transformer, FAMILY.halves, ELSEWHERE)
    assert away(streamer) == [0, 1]
    brought, real = [], streaming.Streamer.bring

    def bring(self, half):
        real(self, half)
        brought.append((half, away(self)))

    monkeypatch.setattr(streaming.Streamer, "bring", bring)
    steps(transformer, parameters, arguments(), 2)
    assert brought == [(0, [1]), (1, [0])] * 2
    assert {id(p) for parts in streamer.parts for p in parts} == {
        id(p) for p in transformer.parameters() if not p.requires_grad
    }
    assert all(torch.equal(p, original[name]) for name, p in transformer.named_parameters() if name in original)


@pytest.mark.parametrize("kind", ["", "nf4"])
def test_streamed_blocks_train_the_same_and_two_of_them_are_there_at_a_time(model, monkeypatch, kind):
    args, results = arguments(), []
    here, real = [], streaming.Streamer.enter

    def enter(self, number):
        real(self, number)
        here.append(len(self.parts) - len(away(self)))

    monkeypatch.setattr(streaming.Streamer, "enter", enter)
    for count in (0, 5):
        transformer, parameters = loaded(model, kind=kind)
        transformer.train().enable_gradient_checkpointing()
        if count:
            streaming.blocks(transformer, count, ELSEWHERE)
        results.append((steps(transformer, parameters, args), parameters))
    (plain, weights), (streamed, others) = results
    assert plain == streamed and all(torch.equal(weights[name], others[name]) for name in weights)
    assert max(here) == 2 and len(here) == 3 * 2 * 5  # each block in forward, and again in backward


def test_the_complete_flux_dev_takes_a_step_as_shapes():
    """FLUX.1-dev's own sizes on torch's "meta" device: what a test can run of 12 billion parameters."""
    from accelerate import init_empty_weights
    from diffusers import FluxTransformer2DModel

    with init_empty_weights():
        transformer = FluxTransformer2DModel(guidance_embeds=True).to(torch.bfloat16)  # diffusers' defaults are dev's
    assert sum(p.numel() for p in transformer.parameters()) == 11_901_408_320
    lower = {id(p) for name in FAMILY.halves for p in getattr(transformer, name).parameters()}
    assert sum(p.numel() for p in transformer.parameters() if id(p) in lower) == 5_399_565_888
    settings = {"rank": 16, "alpha": 16.0, "dropout": 0.0, "seed": 1, "cast_inputs": True}
    parameters = lora.add(transformer, blocks=FAMILY.blocks["all"], **settings)
    transformer.train().enable_gradient_checkpointing()
    batch = {
        "latents": torch.zeros(1, 16, 64, 64),
        "t5": torch.zeros(1, 512, 4096, dtype=torch.bfloat16),
        "clip": torch.zeros(1, 768, dtype=torch.bfloat16),
    }
    loss = flow.loss_of(arguments(), FAMILY, transformer, batch, 1, torch.device("meta"), torch.bfloat16)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in parameters.values())
    found = {name: tuple(p.shape) for name, p in parameters.items()}
    assert len(found) == 2 * (19 * 14 + 38 * 6)
    for layer, (wide, narrow) in PUBLISHED.items():
        assert found[f"{layer}.lora_A.weight"] == (16, narrow) and found[f"{layer}.lora_B.weight"] == (wide, 16)


# names and shapes of LoRAs that other programs write and read, from sd-scripts' networks/convert_flux_lora.py
PUBLISHED = {
    "transformer_blocks.0.attn.add_k_proj": (3072, 3072),
    "transformer_blocks.0.attn.to_add_out": (3072, 3072),
    "transformer_blocks.18.attn.to_out.0": (3072, 3072),
    "transformer_blocks.18.ff.net.0.proj": (12288, 3072),
    "transformer_blocks.0.ff.net.2": (3072, 12288),
    "transformer_blocks.0.ff_context.net.0.proj": (12288, 3072),
    "transformer_blocks.0.norm1.linear": (18432, 3072),
    "transformer_blocks.0.norm1_context.linear": (18432, 3072),
    "single_transformer_blocks.37.attn.to_k": (3072, 3072),
    "single_transformer_blocks.0.norm.linear": (9216, 3072),
    "single_transformer_blocks.0.proj_mlp": (12288, 3072),
    "single_transformer_blocks.37.proj_out": (3072, 15360),
}


def test_the_lora_file_loads_into_a_flux_pipeline_and_does_there_what_it_did_here(model, tmp_path):
    from diffusers import FluxPipeline
    from safetensors import safe_open

    args = arguments(network_alpha=2.0, network_dim=4)
    transformer, parameters = loaded(model, alpha=2.0)
    steps(transformer, parameters, args)
    about = lora.describe(
        args, FAMILY, architecture="flux-1-dev/lora", epoch=1, step=3, images=[], batches=1, epochs=1, steps=3
    )
    data = lora.to_file(parameters, FAMILY.prefix, 2.0 / 4, None, about)
    assert data == lora.to_file(parameters, FAMILY.prefix, 2.0 / 4, None, about)
    file = tmp_path / "x.safetensors"
    file.write_bytes(data)
    with safe_open(file, "pt") as content:
        assert content.metadata() == about
        assert content.metadata()["ss_network_dim"] == "4"
        assert len(list(content.keys())) == len(parameters)
    pipe = FluxPipeline.from_pretrained(model)
    plain = pipe.transformer
    with torch.no_grad():
        before = loss_of(args, plain, a_batch(), 9)
        trained = loss_of(args, transformer.eval(), a_batch(), 9)
        pipe.load_lora_weights(tmp_path, weight_name=file.name)
        after = loss_of(args, pipe.transformer, a_batch(), 9)
    assert abs(before - trained) > 1e-3
    assert after.item() == trained.item()  # alpha / rank is a power of two here, so multiplying it in rounds nothing


def test_tokens_and_positions_are_those_of_the_pipeline():
    from diffusers import FluxPipeline

    latents = torch.randn(2, 16, 8, 12)
    packed = common.pack(latents)
    assert torch.equal(packed, FluxPipeline._pack_latents(latents, 2, 16, 8, 12))
    assert torch.equal(common.unpack(packed, 8, 12), latents)
    ids = FluxPipeline._prepare_latent_image_ids(2, 4, 6, CPU, torch.float32)
    assert torch.equal(common.image_ids(8, 12, CPU), ids)


@pytest.mark.parametrize("kind", ["constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"])
def test_learning_rates_are_those_of_transformers(kind):
    from transformers import get_scheduler

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


def as_published(model, folder):
    """The tiny model with the files that black-forest-labs/FLUX.1-dev has: older names in CLIP, shards, no fast CLIP
    tokenizer, and single files beside the folders."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    for part, stem in (("transformer", "diffusion_pytorch_model"), ("text_encoder_2", "model")):
        original = folder / part / f"{stem}.safetensors"
        tensors = load_file(original)
        shards = {f"{stem}-0000{n + 1}-of-00002.safetensors": sorted(tensors)[n::2] for n in range(2)}
        for file, members in shards.items():
            save_file({name: tensors[name] for name in members}, folder / part / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: file for file, members in shards.items() for name in members}}
        (folder / part / f"{stem}.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        original.unlink()
    clip = folder / "text_encoder" / "model.safetensors"
    named = {f"text_model.{name}": tensor for name, tensor in load_file(clip).items()}
    named["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    save_file(named, clip, metadata={"format": "pt"})
    (folder / "tokenizer" / "tokenizer.json").unlink()
    special = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<|endoftext|>") | {"bos_token": "<|startoftext|>"}
    (folder / "tokenizer" / "special_tokens_map.json").write_text(json.dumps(special), encoding="utf-8")
    stated = {"add_prefix_space": False, "do_lower_case": True, "errors": "replace", "model_max_length": 77}
    settings = {**stated, **special, "tokenizer_class": "CLIPTokenizer"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "flux1-dev.safetensors").write_bytes(b"not looked at")
    return folder


def test_a_folder_as_it_is_published_encodes_and_trains_like_the_same_model_in_todays_files(model, tmp_path):
    from trainer import cache

    answers = []
    for folder in (model, as_published(model, tmp_path / "flux-dev")):
        models.check(folder)
        todo = [("a thing, ünï 🎉", tmp_path / f"{folder.name}.npz")]
        cache.encode_texts(todo, folder, FAMILY, with_tokens(), torch.float32, CPU, Heartbeat(None))
        vae = models.load_part(folder, "vae", torch.float32, CPU)
        transformer = load(folder)
        with torch.no_grad():
            latent = vae.encode(torch.linspace(-1, 1, 3 * 64 * 64).view(1, 3, 64, 64)).latent_dist.mode()
            loss = loss_of(arguments(), transformer, a_batch(), 1)
        answers.append([*cache.load(todo[0][1]).values(), latent, loss])
    assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))


@pytest.mark.parametrize("part", ["vae", "text_encoder", "text_encoder_2"])
def test_a_part_that_lacks_a_tensor_is_refused_and_not_filled_with_noise(model, tmp_path, part):
    from safetensors.torch import load_file, save_file

    shutil.copytree(model / part, tmp_path / part)
    shutil.copy(model / "model_index.json", tmp_path)
    file = next((tmp_path / part).glob("*.safetensors"))
    tensors = load_file(file)
    gone = sorted(tensors)[-2]
    del tensors[gone]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(TrainError, match=f"1 missing tensors: {re.escape(gone)}; download it again"):
        models.load_part(tmp_path, part, torch.float32, CPU)


def another_size(transformer):
    config = json.loads((transformer / "config.json").read_text())
    (transformer / "config.json").write_text(json.dumps({**config, "num_single_layers": 5}))


WEIGHTS, INDEX = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
# what is done to the folder of the transformer → the message
DAMAGED = {
    "vae/config.json is missing; download the complete folder": lambda at: shutil.rmtree(at.parent / "vae"),
    "is a git-lfs pointer": lambda at: (at / WEIGHTS).write_text(POINTER),
    "damaged or truncated": lambda at: (at / WEIGHTS).write_bytes((at / WEIGHTS).read_bytes()[:-1000]),
    "transformer/one.safetensors is missing": lambda at: (at / INDEX).write_text('{"weight_map": {"a": "one.safetensors"}}'),
    "tokenizer/tokenizer.json or vocab.json and merges.txt or spiece.model is missing": lambda at: [
        (at.parent / "tokenizer" / name).unlink() for name in ("tokenizer.json", "merges.txt")
    ],
    "index.json: not valid JSON (Expecting property name": lambda at: (at / INDEX).write_text("{broken"),
    "transformer/config.json: not a JSON object; download it again": lambda at: (at / "config.json").write_text("[1]"),
    "missing tensors: single_transformer_blocks.4.": another_size,
    "the folder does not exist; correct the path, or use a hub id": lambda at: shutil.rmtree(at.parent),
}  # fmt: skip


@pytest.mark.parametrize("message", DAMAGED)
def test_a_model_that_cannot_be_used_says_what_and_where(model, tmp_path, message):
    folder = tmp_path / "a-flux"
    shutil.copytree(model, folder)
    DAMAGED[message](folder / "transformer")
    with pytest.raises(TrainError) as error:
        load(models.locate(str(folder), no_tick))
    assert message in str(error.value) and str(tmp_path) in str(error.value)


def test_a_single_file_is_refused(model):
    with pytest.raises(TrainError, match="is a single file; this trainer reads a folder"):
        models.locate(str(model / "transformer" / WEIGHTS), no_tick)


def test_a_hub_id_that_is_not_downloaded_is_refused_offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(TrainError, match=r"nobody/no-flux: not in the local cache, .*HF_HUB_OFFLINE is set"):
        models.locate("nobody/no-flux", no_tick)


PROMPTS = """# comment
a thing --w 72 --h 64 --s 2 --d 7
another --w 64 --h 64 --s 2 --l 2 --n bad --ss euler
"""


def test_samples_are_fixed_by_their_seed_and_a_bad_one_is_skipped(model, tmp_path, monkeypatch):
    from PIL import Image

    from trainer import cache

    messages: list[str] = []
    (tmp_path / "p.txt").write_text(PROMPTS, encoding="utf-8")
    prompts = samples.read(tmp_path / "p.txt", 42, messages.append)
    assert [(p.width, p.height, p.steps, p.seed, p.cfg) for p in prompts] == [(64, 64, 2, 7, 1.0), (64, 64, 2, 43, 2.0)]
    assert "'--ss euler' is not an option of sample images" in messages[0]
    args, hb = with_tokens(output_dir=tmp_path, output_name="x"), Heartbeat(None)
    dtypes = (torch.float32, torch.float32)
    paths = cache.plan([], samples.texts(prompts), model, tmp_path, args, dtypes, hb, messages.append)
    cache.encode_texts(cache.missing_texts([], paths), model, FAMILY, args, torch.float32, CPU, hb)
    transformer, parameters = loaded(model)
    sampler = samples.Sampler(prompts, paths, model, FAMILY, args, CPU, dtypes, messages.append)

    def make(step):
        made = sampler.make(transformer, None, step, 0.1, hb, torch.no_grad, lambda: None)
        return [(p.name, Image.open(p).convert("RGB").tobytes()) for p in made]

    first, again = make(1), make(2)
    assert [name[:12] for name, _ in first] == ["x_000001_00_", "x_000001_01_"]
    assert first[0][0].endswith("_7.png")
    assert [pixels for _, pixels in first] == [pixels for _, pixels in again]
    steps(transformer, parameters, args)
    assert make(3)[0][1] != first[0][1]
    assert hb.current_phase == "sample"
    monkeypatch.setitem(limits.TABLE, "sample_least_s", limits.Limit(0.0, "a sample image"))
    monkeypatch.setattr(samples, "BUDGET_STEPS", 0.0)
    assert make(4) == []
    assert "sample image 1 is skipped: SampleError: 1 of 2 steps took longer than its limit" in messages[-2]


def test_samples_come_when_sd_scripts_would_make_them():
    def due(step, epoch, **changed):
        args = Namespace(sample_at_first=False, sample_every_n_steps=None, sample_every_n_epochs=None)
        vars(args).update(changed)
        return samples.Sampler([samples.Prompt(0, "x", 1)], None, None, FAMILY, args, None, (), None).due(step, epoch)

    assert due(0, None, sample_at_first=True) and not due(0, None)
    assert due(4, None, sample_every_n_steps=2) and not due(5, None, sample_every_n_steps=2)
    assert due(5, 2, sample_every_n_epochs=2) and not due(5, 1, sample_every_n_epochs=2)
    assert not due(4, None, sample_every_n_steps=2, sample_every_n_epochs=1)
