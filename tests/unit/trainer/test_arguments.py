"""The trainer's command line: sd-scripts' flags, none of them ignored."""

import os
from pathlib import Path

import pytest

import presets
from presets import schema
from trainer.arguments import parse, parser
from trainer.unsupported import reasons

ROOT = Path(__file__).resolve().parents[3]
LEAST = ["--pretrained_model_name_or_path", "m", "--dataset_config", "d", "--output_dir", "o"]
LEAST += ["--network_train_unet_only"]


def flags_in(folder: Path) -> set[str]:
    """Every flag that sd-scripts' FLUX trainer adds, read from its source."""
    return {f"--{name}" for name in schema.flags_of(folder, "flux_train_network.py")}


def test_every_flag_of_sd_scripts_is_taken_or_refused_with_a_reason():
    folder = Path(os.environ.get("SD_SCRIPTS_DIR", ROOT / "sd-scripts"))
    if not (folder / "flux_train_network.py").is_file():
        pytest.skip("no sd-scripts checkout: set SD_SCRIPTS_DIR or run ./start.sh sd-scripts")
    taken = {flag for flag in parser()._option_string_actions if flag.startswith("--")} - {"--help"}
    theirs = flags_in(folder)
    ours = {"--quantize", "--blocks_to_stream", "--text_encoder_cpu", "--ema_decay"}
    assert taken - theirs == ours, "one renderer serves both"
    assert not taken & set(reasons())
    known = taken | set(reasons())
    assert {flag for flag in theirs if flag not in known} == set()


def test_an_unknown_flag_is_refused_with_its_closest_matches(capsys):
    with pytest.raises(SystemExit) as end:
        parse([*LEAST, "--learnig_rate", "1"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: unknown flag --learnig_rate; did you mean --learning_rate?\n"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--blocks_to_swap", "18"], "--blocks_to_swap is not supported by the built-in trainer: moving blocks"),
        (["--t5xxl=x.safetensors"], "use the sd-scripts backend for single files"),
        (["--scale_weight_norms", "1"], "not supported by the built-in trainer: use the sd-scripts backend for this"),
        (["--split_mode"], "add --network_args train_blocks=single"),
        (
            ["--optimizer_type", "Sophia"],
            "--optimizer_type sophia: not supported; use adafactor or adamw8bit or adamw or ",
        ),
        (["--optimizer_type", "AdamWScheduleFree", "--lr_scheduler", "cosine"], "use --lr_scheduler constant"),
        (["--optimizer_type", "Prodigy", "--optimizer_args", "amsgrad=True"], "amsgrad: not an option of prodigy; use"),
        (["--ema_decay", "1"], "--ema_decay 1.0: must be 0 or more and less than 1"),
        (["--network_args", "train_block=single"], "train_block: not supported; use train_blocks or split_qkv"),
        (["--optimizer_args", "weight_decay"], "--optimizer_args 'weight_decay': not KEY=VALUE"),
        (["--lr_scheduler", "constant", "--lr_warmup_steps", "5"], "use --lr_scheduler constant_with_warmup"),
        (["--blocks_to_stream", "4"], "--blocks_to_stream needs --gradient_checkpointing"),
        (["--sample_every_n_steps", "2"], "add --sample_prompts FILE"),
        (["--max_train_epochs", "0"], "--max_train_epochs 0: must be 1 or more"),
        (["--lr_scheduler", "linear", "--lr_warmup_steps", "-3"], "--lr_warmup_steps -3.0: must be 0 or more"),
        (["--learning_rate", "0"], "--learning_rate 0.0: must be more than 0"),
        (["--unet_lr", "nan"], "--unet_lr nan: must be more than 0"),
        (["--network_dropout", "1"], "must be 0 or more and less than 1"),
        (["--timestep_sampling", "sgima"], "invalid choice: 'sgima'"),
        (["--resolution"], "expected one argument"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(words, reason, capsys):
    with pytest.raises(SystemExit) as end:
        parse([*LEAST, *words])
    assert end.value.code == 2
    assert reason in capsys.readouterr().err


def test_training_the_text_encoders_is_not_quietly_left_out(capsys):
    with pytest.raises(SystemExit):
        parse(LEAST[:-1])
    assert "add --network_train_unet_only" in capsys.readouterr().err


def test_the_flags_of_every_tier_are_taken():
    trainer = presets.trainer_of("flux-dev", "sd-scripts")
    tables = [tier["flags"] for tier in trainer["tiers"].values()]
    assert len(tables) == 3
    for table in tables:
        words = []
        for key, value in {**trainer["memory"], **trainer["flags"], **table}.items():
            if value is not False:
                values = [] if value is True else value if isinstance(value, list) else [value]
                words += [f"--{key}", *map(str, values)]
        args = parse([*LEAST, *[w for w in words if w != LEAST[-1]]])
        assert args.optimizer_type in ("adafactor", "adamw8bit")
        assert not args.split_mode or args.train_blocks == "single"
