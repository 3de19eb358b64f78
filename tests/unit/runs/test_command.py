"""What a spec becomes: the tiers' flags exactly, flags that the real parsers take, files that the trainers read."""

import shlex
from pathlib import Path

import pytest
import tiny_sd_scripts
import tomlkit
import tomllib
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lint_corpus import FLUXGYM
from runs_helpers import spec

import presets
import runs
from runs import fields, flags
from runs.flags import check_extra
from runs.foreign import read
from runs.foreign_spec import convert
from runs.spec import RunSpec

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


@pytest.mark.parametrize("backend", ["sd-scripts", "diffusers"])
def test_every_rendered_flag_is_one_of_its_parser(backend):
    """Those of the tables, of the fields and of the user."""
    if backend == "sd-scripts":
        tiny_sd_scripts.need(run=False)
    everything = {
        "prompts": ["a"], "sample_every_n_steps": 5, "trackers": "wandb", "gpus": 2, "gradient_accumulation": 2,
        "max_train_steps": 9, "workers": 0, "extra": {"network_dropout": 0.1, "training_comment": "-starts with a dash"},
    }  # fmt: skip
    for tier in TIERS:
        check_extra(spec(backend=backend, tier=tier, **everything))


def test_extra_flags_win_false_takes_a_flag_away_and_float32_has_no_fp8():
    extra = {"guidance_scale": 3.5, "highvram": False, "sdpa": False, "xformers": True}
    words = words_of(spec(extra=extra, mixed_precision="no"))
    assert words["guidance_scale"] == ["3.5"] and words["xformers"] == []
    assert not {"highvram", "sdpa", "fp8_base"} & set(words) and words["save_precision"] == ["float"]


@pytest.mark.parametrize("platform", ["linux", "win32", "darwin"])
def test_a_platform_has_only_settings_that_do_not_hang_there(platform):
    words = by_flag(runs.arguments(spec(workers=2), Path("/out"), platform=platform))
    assert words["max_data_loader_n_workers"] == ["2" if platform == "linux" else "0"]
    assert ("persistent_data_loader_workers" in words) == (platform == "linux")
    text = runs.script(spec(), Path("/out"), platform=platform)
    assert ("MKL_NUM_THREADS" in text) == (platform == "darwin")
    assert "OMP_NUM_THREADS=1" in text, "one thread, as accelerate's launcher sets it"
    several = runs.script(spec(gpus=2), Path("/out"), platform=platform)
    assert ("OMP_NUM_THREADS" in several) == (platform == "darwin")
    assert "--num_cpu_threads_per_process 1" in several


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


def test_toml_readers_read_the_trigger_as_it_is():
    trigger = """say "x" back\\slash \\u0041 é 日本 🦊 a = [1] # no it's \x01\x7f"""
    ours = tomllib.loads(tomlkit.dumps(runs.dataset_tables(spec(trigger=f"{trigger}\ttab"))))
    assert ours["datasets"][0]["subsets"][0]["class_tokens"] == f"{trigger} tab"


def test_a_prompt_is_one_line_with_size_steps_and_seed():
    made = spec(prompts=["a\ncat", "# not a comment", "own --W 640 --s 4", "\t"], sample_every_n_steps=1, seed=7)
    first, second, own, end = runs.sample_prompts(made).split("\n")
    assert (first, second) == tuple(f"{one} --w 512 --h 512 --s 20 --d 7" for one in ("a cat", " # not a comment"))
    assert (own, end) == ("own --W 640 --s 4 --h 512 --d 7", "")
    assert runs.sample_prompts(spec(sample_every_n_steps=5)) == "ohwx --w 512 --h 512 --s 20 --d 42\n"


text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@settings(max_examples=30, deadline=None)
@given(text, text, st.lists(text), st.dictionaries(st.sampled_from(["vae", "clip_l"]), text))
@example("x 🦊", '"\\\n', ["a\tb", "'''"], {"network_args": ["a=1"], "sdpa": False, "vae": "é"})
def test_any_spec_survives_its_file(tmp_path_factory, name, trigger, prompts, extra):
    folder = tmp_path_factory.getbasetemp()
    made = spec(name=f"{name}x", trigger=trigger, prompts=prompts, extra=extra)
    runs.save(folder, made)
    assert runs.load(folder) == made
    assert made.slug.isascii() and 0 < len(made.slug) <= 80 and "/" not in made.slug


def test_an_invalid_run_toml_is_refused_with_its_line_or_field(tmp_path):
    path = tmp_path / "run.toml"
    for content, message in (
        (b"name = \nx = 1", "at line 1"),
        (b'name = "caf\xe9"', "not UTF-8"),
        (b'name = "x"\nrankk = 3', "rankk: Unknown field; did you mean rank"),
        (b'name = "x"\nmodel = "gone"', "no base model 'gone'"),
        (b"rank = 3", "name: Missing; add a value"),
    ):
        path.write_bytes(content)
        with pytest.raises(runs.RunError, match=message.replace("(", r"\(")) as caught:
            runs.load(tmp_path)
        assert str(path) in str(caught.value)
    path.unlink()
    with pytest.raises(runs.RunError, match="does not exist"):
        runs.load(tmp_path)


def test_names_make_folders():
    for name, folder in (
        ("My LoRA_v1.0", "My-LoRA_v1-0"), ("  déjà vu ", "deja-vu"), ("../../etc", "etc"), ("日本", "Ri-Ben"),
        ("a" * 200, "a" * 80), ("-rf", "rf"), ("$(id)", "id"), ("com10", "com10"),
    ):  # fmt: skip
        assert runs.slug(name) == folder
    for name in ("", "  ", "☃", "__", "nul", "COM1", "...", "/"):
        with pytest.raises(runs.RunError):
            runs.slug(name)


def test_flags_are_checked_against_the_backends_parser(tmp_path, data, monkeypatch):
    check_extra(spec(extra={"network_dropout": 0.1, "highvram": False}))
    for extra, message in (
        ({"blocks_to_swap": 18}, "blocks_to_swap: The built-in trainer does not support it: moving blocks"),
        ({"sdpa": "yes"}, "sdpa: Must be true or false, not 'yes'"),
        ({"loss_type": "l3"}, "loss_type: Must be one of l1, l2"),
    ):
        with pytest.raises(runs.RunError, match=message):
            check_extra(spec(extra=extra))
    fields = flags.settings(["network-dim=8", "--sdpa=no", "lr_warmup_steps=10", "prompts=a\nb"], {"name": "x"})[0]
    extra = {"sdpa": False, "lr_warmup_steps": 10.0}
    assert fields == {"name": "x", "rank": "8", "prompts": ["a", "b"], "extra": extra}
    monkeypatch.setenv("SD_SCRIPTS_DIR", str(tmp_path))
    check_extra(spec(backend="sd-scripts", extra={"clip_l": "/c", "ae": "/a"}))
    message = r"lowram: Cannot be checked, because sd-scripts is not installed; run ./start\.sh"
    with pytest.raises(runs.RunError, match=message):
        check_extra(spec(backend="sd-scripts", extra={"lowram": True}))


def test_a_users_model_is_used_and_a_broken_one_named(data):
    (data / "models.toml").write_text('[models.mine]\nname = "Mine"\nrepo = "/models/mine"\n', encoding="utf-8")
    assert words_of(spec(model="Mine"))["pretrained_model_name_or_path"] == ["/models/mine"]
    assert presets.models()["mine"]["backends"] == ["diffusers"]
    for broken, message in (
        ("[models.mine\n", "models.toml: "),
        ("[models.mine]\nrepos = 1\n", "unknown key 'repos'"),
        ('[models.mine]\nrepo = "a"\nfamily = "sd9"\n', "unknown family 'sd9'"),
        ('[models.mine]\nname = "x"\n', "set `repo` for diffusers"),
    ):
        (data / "models.toml").write_text(broken, encoding="utf-8")
        with pytest.raises(presets.PresetError, match=message):
            presets.models()


def test_a_setting_that_is_declared_once_is_in_the_form_the_command_the_import_and_the_data_set(tmp_path):
    """`caption_dropout` has one declaration, in RunSpec; docs/settings.md has it by test_documentation.py."""
    shown = next(one for one in fields.MORE if one.key == "caption_dropout")
    assert (shown.label, shown.kind, fields.EMPTY["caption_dropout"]) == ("Uses without a caption", "text", 0.0)
    made = runs.make(flags.settings(["caption_dropout_rate=0.25"], {"name": "x", "backend": "diffusers"})[0])
    assert made.caption_dropout == 0.25
    assert runs.dataset_tables(made)["general"]["caption_dropout_rate"] == 0.25
    assert "caption_dropout_rate" not in runs.dataset_tables(spec(backend="diffusers"))["general"]
    assert RunSpec.model_json_schema()["properties"]["caption_dropout"]["title"] == "Uses without a caption"
    ours = convert(read([("train.sh", "python -m trainer --network_dim 8 --caption_dropout_rate 0.25")]))
    assert ours.fields["caption_dropout"] == "0.25"
    theirs = convert(read([("train.sh", "python flux_train_network.py --network_dim 8 --caption_dropout_rate 0.25")]))
    assert "caption_dropout" not in theirs.fields, "kohya's trainers encode captions once"
    row = next(one for one in theirs.rows if one.name == "--caption_dropout_rate")
    assert row.outcome == "unsupported" and "encode captions once" in row.text
