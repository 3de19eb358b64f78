"""What a spec becomes: the tiers' flags exactly, flags that the real parsers take, files that the trainers read."""

import shlex
from pathlib import Path

import pytest
from families import MODELS, fitting, made
from lint_corpus import FLUXGYM
from runs_helpers import spec

import presets
import runs
from runs import weights
from runs.flags import check_extra

OF_A_TIER = {"optimizer_type", "optimizer_args", "split_mode", "network_args", "lr_scheduler", "max_grad_norm"}
TIERS = {tier: shlex.split(" ".join(flags)) for tier, flags in FLUXGYM.items()}
ALL = {
    "mixed_precision": ["bf16"], "sdpa": [], "gradient_checkpointing": [], "fp8_base": [], "cache_latents_to_disk": [],
    "cache_text_encoder_outputs_to_disk": [], "seed": ["42"], "max_data_loader_n_workers": ["2"], "save_state": [],
    "persistent_data_loader_workers": [], "highvram": [], "network_dim": ["4"], "learning_rate": ["0.0008"],
    "timestep_sampling": ["shift"], "discrete_flow_shift": ["3.1582"], "model_prediction_type": ["raw"],
    "guidance_scale": ["1.0"], "loss_type": ["l2"], "save_precision": ["bf16"], "max_train_epochs": ["16"],
    "save_every_n_epochs": ["4"], "network_train_unet_only": [],
}  # fmt: skip


def by_flag(words: list[str]) -> dict[str, list[str]]:
    """A command line as flag → values."""
    out: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.removeprefix("--").partition("=")
            assert flag not in out, f"--{flag} is written twice"
            out[flag] = [value] if equals else []
            last = flag
        else:
            out[last].append(word)
    return out


def words_of(made, folder=Path("/out"), **more) -> dict[str, list[str]]:
    return by_flag(runs.arguments(made, folder, platform="linux", **more))


@pytest.mark.parametrize("backend", ["sd-scripts", "diffusers"])
@pytest.mark.parametrize("tier", list(TIERS))
def test_a_tier_has_exactly_its_flags_and_none_swaps_blocks(tier, backend):
    words = words_of(spec(tier=tier, backend=backend))
    assert {k: v for k, v in words.items() if k in OF_A_TIER} == by_flag(TIERS[tier])
    assert {k: words.get(k) for k in ALL} == ALL
    assert not {"blocks_to_swap", "cpu_offload_checkpointing", "blockwise_fused_optimizers"} & set(words)


def test_every_rendered_flag_is_one_of_the_built_in_trainers_parser():
    """Those of the tables, of the fields and of the user; kohya's parsers: tests/unit/presets/test_families.py."""
    everything = {
        "prompts": ["a"], "sample_every_n_steps": 5, "trackers": "wandb", "gpus": 2, "gradient_accumulation": 2,
        "max_train_steps": 9, "workers": 0, "extra": {"network_dropout": 0.1, "training_comment": "-with a dash"},
    }  # fmt: skip
    for model in (model for model, able in MODELS if able == "diffusers"):
        for tier in fitting(model, "diffusers"):
            check_extra(made(model, "diffusers", tier, **everything))


def test_extra_flags_win_false_takes_a_flag_away_and_float32_has_no_fp8():
    extra = {"guidance_scale": 3.5, "highvram": False, "sdpa": False, "xformers": True, "lr_warmup_steps": 9.0}
    words = words_of(spec(extra=extra, mixed_precision="no"))
    assert words["guidance_scale"] == ["3.5"] and words["xformers"] == [] and words["lr_warmup_steps"] == ["9"]
    assert not {"highvram", "sdpa", "fp8_base"} & set(words) and words["save_precision"] == ["float"]
    words = words_of(spec(model="z-image", backend="musubi", tier="20G", extra={"flash_attn": True}))
    assert "flash_attn" in words and "sdpa" not in words, "which musubi-tuner would use instead"
    for given in (["rank_dropout=0.1"], ["train_blocks=double"]):
        words = words_of(spec(tier="12G", backend="sd-scripts", extra={"network_args": given}))
        assert words["network_args"] == ["train_blocks=single", *given][-1 if "train" in given[0] else 0 :]


@pytest.mark.parametrize("platform", ["linux", "win32", "darwin"])
def test_a_platform_has_only_settings_that_do_not_hang_there(platform):
    words = by_flag(runs.arguments(spec(workers=2), Path("/out"), platform=platform))
    assert words["max_data_loader_n_workers"] == ["2" if platform == "linux" else "0"]
    assert ("persistent_data_loader_workers" in words) == (platform == "linux")
    text = runs.script(spec(), Path("/out"), platform=platform)
    assert ("MKL_NUM_THREADS" in text) == (platform == "darwin")
    assert "OMP_NUM_THREADS=1" in text, "one thread, as accelerate's launcher sets it"


def test_states_older_than_the_kept_ones_are_pruned():
    """sd-scripts removes, at step S, the state of step S - N - 1 rounded down to the interval (get_remove_step_no)."""
    for keep in (1, 2, 3, 7):
        words = words_of(spec(save_every_n_steps=10, keep_states=keep))
        last_n, left = int(words["save_last_n_steps_state"][0]), set()
        for step in range(10, 310, 10):
            left.add(step)
            remove = step - last_n - 1
            left.discard(remove - remove % 10)
        assert left == set(range(310 - 10 * keep, 310, 10))


def test_a_model_is_loaded_from_where_its_backend_looks(data):
    def files(**fields):
        words = words_of(spec(**fields))
        return [words.get(f, [None])[0] for f in ("pretrained_model_name_or_path", "clip_l", "t5xxl", "ae")]

    assert files() == ["black-forest-labs/FLUX.1-dev", None, None, None]
    assert files(model="tiny-flux")[0] == str(data / "models/tiny-flux")
    assert files(backend="sd-scripts", extra={"clip_l": "/mine/clip.sft"}) == [
        str(data / "models/flux1-dev.safetensors"), "/mine/clip.sft",
        str(data / "models/t5xxl_fp16.safetensors"), str(data / "models/ae.safetensors"),
    ]  # fmt: skip


@pytest.mark.parametrize("backend", ["sd-scripts", "diffusers"])
@pytest.mark.parametrize("resolution", [32, 64, 96, 640, 2048])
def test_buckets_are_valid_for_every_resolution(resolution, backend):
    """sd-scripts asserts min ≤ resolution ≤ max, and steps in multiples of 64 (train_util, train_network)."""
    table = runs.dataset_tables(spec(resolution=resolution, backend=backend))["datasets"][0]
    step = table["bucket_reso_steps"]
    assert step % (64 if backend == "sd-scripts" else 32) == 0
    assert table["min_bucket_reso"] % step == table["max_bucket_reso"] % step == 0
    assert not table["enable_bucket"] or 0 < table["min_bucket_reso"] <= resolution <= table["max_bucket_reso"]
    assert table["enable_bucket"] or resolution < 64
    mine = {"shuffle_caption": True, "enable_bucket": False, "bucket_reso_steps": 128}
    tables = runs.dataset_tables(spec(resolution=resolution, backend=backend, extra=mine))
    assert mine.items() <= {**tables["general"], **tables["datasets"][0]}.items(), "an option that this file has, too"


def test_a_prompt_is_one_line_with_size_steps_and_seed():
    made = spec(prompts=["a\ncat", "# not a comment", "own --W 640 --s 4", "\t"], sample_every_n_steps=1, seed=7)
    first, second, own, end = runs.sample_prompts(made).split("\n")
    assert (first, second) == tuple(f"{one} --w 512 --h 512 --s 20 --d 7" for one in ("a cat", " # not a comment"))
    assert (own, end) == ("own --W 640 --s 4 --h 512 --d 7", "")
    assert runs.sample_prompts(spec(sample_every_n_steps=5)) == "ohwx --w 512 --h 512 --s 20 --d 42\n"


def test_a_users_model_is_used_and_a_broken_one_named(data):
    assert "mine" not in presets.models()
    own = '[models.mine]\nname = "Mine"\nrepo = "/models/mine"\n[models.flux-dev]\nrepo = "me/other"\n'
    (data / "models.toml").write_text(own, encoding="utf-8")
    assert words_of(spec(model="Mine"))["pretrained_model_name_or_path"] == ["/models/mine"]
    assert presets.models()["flux-dev"]["repo"] == "me/other"
    assert presets.models()["mine"]["backends"] == ["diffusers"]
    for broken, message in (
        ("[models.mine\n", "models.toml: "),
        ("[models.mine]\nrepos = 1\n", "unknown key 'repos'"),
        ('[models.mine]\nrepo = "a"\nfamily = "sd9"\n', "unknown family 'sd9'"),
        ('[models.mine]\nname = "x"\n', "set `repo` for diffusers"),
        ('[models.mine]\nrepo = "a"\nbackends = [["x"]]\n', "no trainer can load it"),
        ('[models.mine]\nrepo = "a"\nsettings = { resolution = "512" }\n', "resolution must be a number, not '512'"),
        ('[downloads]\n"x.safetensors" = "me/repo"\n', 'write "x.safetensors" = '),
    ):
        (data / "models.toml").write_text(broken, encoding="utf-8")
        with pytest.raises(presets.PresetError, match=message):
            presets.models(), presets.tables.downloads()


def test_a_users_model_without_a_file_that_its_trainer_needs_is_not_started(data):
    mine = 'files = { clip_l = "c.safetensors" }\nfamily = "flux"\n'
    (data / "models.toml").write_text(f'[models.a]\n{mine}[models.b]\nbackends = ["diffusers"]\n{mine}')
    wanted = {"a": "a has no pretrained_model_name_or_path; add it in models.toml", "b": "b has no repo; add it in"}
    for key, text in wanted.items():
        assert text in weights.problems(spec(model=key, backend=presets.backend_of(key)))[0]
        given = spec(model=key, backend=presets.backend_of(key), extra={"pretrained_model_name_or_path": "/none"})
        assert "has no" not in str(weights.problems(given)), "an option names it"
