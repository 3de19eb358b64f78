"""Flags of sd-scripts that the built-in trainer does not have: each is refused with a reason."""

import tiny_sd_scripts

from presets import schema
from trainer.arguments import parser, problem
from trainer.unsupported import REASONS, reasons


def test_every_flag_of_sd_scripts_is_taken_or_refused_with_a_reason():
    tiny_sd_scripts.need(run=False)
    taken = {flag for flag in parser()._option_string_actions if flag.startswith("--")} - {"--help"}
    theirs = {f"--{name}" for name in schema.flags_of(tiny_sd_scripts.checkout(), "flux_train_network.py")}
    ours = {"--quantize", "--blocks_to_stream", "--text_encoder_cpu", "--ema_decay"}
    assert taken - theirs == ours, "one renderer serves both"
    assert not taken & set(reasons())
    assert theirs - taken - set(reasons()) == set()


def test_each_flag_has_one_reason_with_which_it_is_refused():
    flags = " ".join(REASONS.values()).split()
    assert len(flags) == len(reasons())
    for flag, reason in reasons().items():
        assert problem([f"{flag}=1"]) == f"{flag} is not supported by the built-in trainer: {reason}"
