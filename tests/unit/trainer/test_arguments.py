"""The trainer's command line: sd-scripts' flags, none of them ignored."""

import pytest
import tiny_sd_scripts

from presets import schema
from trainer.arguments import parse, parser, reasons

LEAST = ["--pretrained_model_name_or_path", "m", "--dataset_config", "d", "--output_dir", "o"]
LEAST += ["--network_train_unet_only"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--learnig_rate", "1"], "error: unknown flag --learnig_rate; did you mean --learning_rate?\n"),
        (["--blocks_to_swap", "18"], "--blocks_to_swap is not supported by the built-in trainer: moving blocks"),
        (["--t5xxl=x.safetensors"], "use the sd-scripts backend for single files"),
        (["--scale_weight_norms", "1"], "not supported by the built-in trainer: use the sd-scripts backend for this"),
        (["--split_mode"], "add --network_args train_blocks=single"),
        (["--optimizer_type", "Sophia"], "--optimizer_type sophia: not supported; use adafactor or adamw8bit or adamw"),
        (["--optimizer_type", "AdamWScheduleFree", "--lr_scheduler", "cosine"], "use --lr_scheduler constant"),
        (["--optimizer_type", "Prodigy", "--optimizer_args", "amsgrad=True"], "amsgrad: not an option of prodigy; use"),
        (["--ema_decay", "1"], "--ema_decay 1.0: must be 0 or more and less than 1"),
        (["--network_args", "train_block=single"], "train_block: not supported; use train_blocks or split_qkv"),
        (["--optimizer_args", "weight_decay"], "--optimizer_args 'weight_decay': not KEY=VALUE"),
        (["--lr_scheduler", "constant", "--lr_warmup_steps", "5"], "use --lr_scheduler constant_with_warmup"),
        (["--blocks_to_stream", "4"], "--blocks_to_stream needs --gradient_checkpointing"),
        (["--zero_terminal_snr", "--min_snr_gamma", "5"], "where nothing else is left; add --v_parameterization"),
        (["--sample_every_n_steps", "2"], "add --sample_prompts FILE"),
        (["--max_train_epochs", "0"], "--max_train_epochs 0: must be 1 or more"),
        (["--lr_scheduler", "linear", "--lr_warmup_steps", "-3"], "--lr_warmup_steps -3.0: must be 0 or more"),
        (["--lr_scheduler", "linear", "--lr_warmup_steps", "inf"], "invalid int_or_ratio value: 'inf'"),
        (["--output_name", "mine/lora"], "--output_name 'mine/lora': must be the name of a file; --output_dir has its"),
        (["--learning_rate", "0"], "--learning_rate 0.0: must be more than 0"),
        (["--unet_lr", "nan"], "--unet_lr nan: must be more than 0"),
        (["--validation_split", "1"], "--validation_split 1.0: must be 0 or more and less than 1, such as 0.1"),
        (["--validation_split", "nan"], "--validation_split nan: must be 0 or more"),
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


def test_every_flag_of_sd_scripts_is_taken_or_refused_with_a_reason():
    tiny_sd_scripts.need(run=False)
    taken = {flag for flag in parser()._option_string_actions if flag.startswith("--")} - {"--help"}
    theirs = {f"--{name}" for name in schema.flags_of(tiny_sd_scripts.checkout(), "flux_train_network.py")}
    ours = {"--quantize", "--blocks_to_stream", "--text_encoder_cpu", "--ema_decay"}
    assert taken - theirs == ours, "one renderer serves both"
    assert not taken & set(reasons())
    assert theirs - taken - set(reasons()) == set()
