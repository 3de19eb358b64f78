"""Flags of sd-scripts that the built-in trainer does not have: each has a reason. The refusal: test_arguments.py."""

import tiny_sd_scripts

from presets import schema
from trainer.arguments import parser
from trainer.unsupported import reasons


def test_every_flag_of_sd_scripts_is_taken_or_refused_with_a_reason():
    tiny_sd_scripts.need(run=False)
    taken = {flag for flag in parser()._option_string_actions if flag.startswith("--")} - {"--help"}
    theirs = {f"--{name}" for name in schema.flags_of(tiny_sd_scripts.checkout(), "flux_train_network.py")}
    ours = {"--quantize", "--blocks_to_stream", "--text_encoder_cpu", "--ema_decay"}
    assert taken - theirs == ours, "one renderer serves both"
    assert not taken & set(reasons())
    assert theirs - taken - set(reasons()) == set()
