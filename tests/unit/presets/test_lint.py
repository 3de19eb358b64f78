"""Lint finds what is known to hang in any training script, and fixes it without changing what is trained."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from lint_corpus import GOOD, UNGUARDED, plus

import presets
from presets.fix import fix
from presets.lint import lint
from presets.training import trainings


def ids(text: str, name: str = "train.sh", base: Path | None = None) -> set[str]:
    return {finding.id for finding in lint(text, name, base)}


def flags_of(text: str, name: str = "train.sh", base: Path | None = None) -> dict[str, list]:
    (training,) = trainings(text, name, base)
    return {flag: known.values for flag, known in training.flags.items()}


FUSED = {"blockwise_fused_optimizers", "fused_backward_pass"}
# rule: (a script that breaks it, flags that the fix may add, flags that it may remove)
FAULTS = {
    "line-endings": (GOOD.replace("\n", "\r\n"), set(), set()),
    "byte-order-mark": (f"\ufeff{GOOD}", set(), set()),
    "block-swap": (plus("--blocks_to_swap 18"), {"split_mode"}, {"blocks_to_swap"}),
    "split-mode": (plus("--split_mode", UNGUARDED), set(), set()),
    "split-mode-conflict": (plus("--split_mode --cpu_offload_checkpointing"), set(), {"cpu_offload_checkpointing"}),
    "fused-optimizer": (plus("".join(f" --{flag}" for flag in sorted(FUSED))), set(), FUSED),
    "no-state": (GOOD.replace("--save_state", ""), {"save_state"}, set()),
    "persistent-without-workers": (GOOD.replace("workers 2", "workers 0"), set(), {"persistent_data_loader_workers"}),
    "many-workers": (GOOD.replace("workers 2", "workers 8"), set(), set()),
    "windows-workers": ("accelerate launch ^\r\n  -m sd_scripts_patches sd\\flux_train_network.py ^\r\n  --save_state "
                        "--save_every_n_steps 9 --save_last_n_steps_state 9 --persistent_data_loader_workers\r\n",
                        {"max_data_loader_n_workers"}, {"persistent_data_loader_workers"}),
    "unguarded": (UNGUARDED, set(), set()),
    "cache-in-memory": (
        GOOD.replace("--cache_latents_to_disk", "").replace("--cache_text_encoder_outputs_to_disk", ""),
        {"cache_latents_to_disk", "cache_text_encoder_outputs_to_disk"}, set(),
    ),
}  # fmt: skip


def test_every_rule_has_a_reason_a_source_a_fix_and_a_test():
    rules = presets.read_table("lint.toml")["rules"]
    assert set(rules) == {*FAULTS, "cut-off", "network-disk"}
    for rule in rules.values():
        assert rule["level"] in ("fail", "hang", "loss", "waste") and rule["why"] and rule["source"] and rule["fix"]


@pytest.mark.parametrize("rule", list(FAULTS))
def test_each_problem_is_found_and_fixed_and_the_training_stays(rule):
    text, added, taken = FAULTS[rule]
    name = "train.bat" if rule == "windows-workers" else "train.sh"
    assert rule in ids(text, name)
    finding = next(f for f in lint(text, name) if f.id == rule)
    assert finding.fixable and finding.line >= 1
    out = fix(text, name)
    assert ids(out.text, name) == set() and rule in out.fixed
    before, after = flags_of(text, name), flags_of(out.text, name)
    assert set(after) - set(before) == added and set(before) - set(after) == taken
    changed = {flag for flag in set(before) & set(after) if before[flag] != after[flag]}
    assert changed <= ({"max_data_loader_n_workers"} if rule == "many-workers" else set())
    assert fix(out.text, name).text == out.text, "a fixed script needs no fix"


def test_what_is_absent_has_its_default_and_what_cannot_be_known_is_not_called_absent(tmp_path):
    after = flags_of(fix(re.sub(r"--save\S+( \d)?", "", GOOD)).text)
    assert (after["save_state"], after["save_every_n_epochs"], after["save_last_n_epochs_state"]) == ([], ["1"], ["2"])
    assert "many-workers" in ids(GOOD.replace("--max_data_loader_n_workers 2", "")), "eight"
    guarded = "accelerate launch -m sd_scripts_patches sd/flux_train_network.py"
    assert ids(f'{guarded} "$@"\n') == ids(f"{guarded} --config_file gone.toml", base=tmp_path) == set()
    assert ids('python flux_train_network.py --blocks_to_swap "$N" "$@"') == {"block-swap", "unguarded"}
    assert "block-swap" not in ids("python flux_train_network.py --blocks_to_swap 0 $X")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_kohya_ss_settings_in_a_config_file_are_read_and_left_to_a_person_where_they_must_go(tmp_path, newline):
    config = tmp_path / "config_lora.toml"
    lines = ['output_dir = "/out"', "max_data_loader_n_workers = 0", "persistent_data_loader_workers = true"]
    lines += ["blocks_to_swap = 4", "save_every_n_epochs = 1", "save_state = false"]
    lines += ["sample_every_n_epochs = 1 # often", "[nested]", "cache_latents = true", ""]
    config.write_bytes(newline.join(lines).encode())
    original = config.read_bytes()
    text = f"accelerate launch /kohya/sd-scripts/flux_train_network.py --config_file {config}\n"
    wanted = {"block-swap", "no-state", "persistent-without-workers", "unguarded", "cache-in-memory"}
    assert ids(text) == wanted
    out = fix(text)
    assert ids(out.text) == {"block-swap", "persistent-without-workers"} and config.read_bytes() == original
    assert [path.name for path in tmp_path.iterdir()] == [config.name]


def test_a_split_mode_that_trains_all_blocks_is_left_out():
    """With other blocks than the single ones it was block swap and nothing else; the launcher would refuse it."""
    text = plus("--split_mode", UNGUARDED).replace("train_blocks=single", "train_blocks=all")
    out = fix(text)
    assert "--split_mode" not in out.text and "sd_scripts_patches" in out.text and ids(out.text) == set()


def test_a_network_disk_is_named_and_left_to_a_person(monkeypatch):
    mounts = {"/": "ext4", "/share": "nfs4"}
    table = [SimpleNamespace(mountpoint=at, fstype=kind) for at, kind in mounts.items()]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: table)
    for script, paths, found in (
        (UNGUARDED, "--train_data_dir '/share/my cats'", True),
        (GOOD, "--train_data_dir '/share/my cats'", False),  # the guards bound its reads
        (GOOD, "--output_dir cats/out", True),  # in the folder of the script
        (GOOD, '--output_dir "$OUT"', False),
    ):
        text = plus(paths, script)
        (*_, last) = lint(text, base=Path("/share")) or [None]
        assert (last is not None and last.id == "network-disk" and not last.fixable) == found
