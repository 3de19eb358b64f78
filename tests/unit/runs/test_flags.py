"""Flags are checked against the parser of the backend's trainer before anything starts."""

import pytest
from families import made
from runs_helpers import spec

import runs
from runs.flags import check_extra, known_flags, settings, table_faults


def test_flags_are_checked_against_the_backends_parser(tmp_path, data, monkeypatch):
    check_extra(spec(extra={"network_dropout": 0.1, "highvram": False}))
    for extra, message in (
        ({"blocks_to_swap": 18}, "blocks_to_swap: The built-in trainer does not support it: moving blocks"),
        ({"sdpa": "yes"}, "sdpa: Must be true or false, not 'yes'"),
        ({"loss_type": "l3"}, "loss_type: Must be one of l1, l2"),
    ):
        with pytest.raises(runs.RunError, match=message):
            check_extra(spec(extra=extra))
    fields = settings(["network-dim=8", "--sdpa=no", "lr_warmup_steps=10%", "prompts=a\nb"], {"name": "x"})[0]
    extra = {"sdpa": False, "lr_warmup_steps": 0.1}
    assert fields == {"name": "x", "rank": "8", "prompts": ["a", "b"], "extra": extra}
    assert "is not a JSON list" in settings(["network_args=" + "[" * 100_000], {"name": "x"})[1][0].message
    monkeypatch.setenv("SD_SCRIPTS_DIR", str(tmp_path))
    check_extra(spec(backend="sd-scripts", extra={"clip_l": "/c", "ae": "/a"}))
    message = r"lowram: Cannot be checked, because sd-scripts is not installed; run ./start\.sh"
    with pytest.raises(runs.RunError, match=message):
        check_extra(spec(backend="sd-scripts", extra={"lowram": True}))


def test_a_checkout_that_lacks_a_flag_of_the_tables_is_named_and_without_one_no_flag_is_guessed(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSUBI_DIR", str(tmp_path))
    one = made("z-image", "musubi", "12G", extra={"split_attn": True})
    assert known_flags("musubi", "z-image") == {}
    with pytest.raises(runs.RunError, match=r"split_attn: Cannot be checked, because .* not installed; run \./start"):
        check_extra(one)
    check_extra(made("z-image", "musubi", "12G", extra={"dit": "/mine.safetensors"}))
    scripts = tmp_path / "src/musubi_tuner"
    scripts.mkdir(parents=True)
    switches = dict.fromkeys(("fp8_llm", "skip_existing"), ", action='store_true'")
    for name, flags in (
        ("latents", {"vae": "", "dataset_config": ""}),
        ("text_encoder_outputs", {"text_encoder": "", "batch_size": "", "dataset_config": "", **switches}),
    ):
        adds = "".join(f"    parser.add_argument('--{flag}'{kind})\n" for flag, kind in flags.items())
        text = f"import argparse\ndef main():\n    parser = argparse.ArgumentParser()\n{adds}    parser.parse_args()\n"
        (scripts / f"zimage_cache_{name}.py").write_text(text)
    one = made("z-image", "musubi", "12G")
    (fault,) = table_faults(one)
    assert fault.field == "backend" and "zimage_cache_latents.py in " in fault.message
    assert "does not take --skip_existing" in fault.message and "./start.sh musubi" in fault.message
    with pytest.raises(runs.RunError, match="does not take --skip_existing"):
        check_extra(one)
