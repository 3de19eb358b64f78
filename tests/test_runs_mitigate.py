"""A mitigation changes one thing, says so, is done once, and leaves a spec that renders and lints clean."""

from pathlib import Path

import pytest
from runs_helpers import run_script, spec

import presets
import runs
from presets.lint import lint
from runs import mitigate

EVERYTHING = {
    "backend": "sd-scripts", "tier": "20G", "batch_size": 4, "gpus": 2, "prompts": ["x"], "sample_every_n_steps": 5,
    "trackers": "wandb", "mixed_precision": "fp16", "gradient_accumulation": 3,
    "extra": {"blocks_to_swap": 18, "validation_split": 0.1, "sample_at_first": True},
}  # fmt: skip


@pytest.mark.parametrize("name", list(mitigate.MITIGATIONS))
def test_it_changes_something_once_and_says_what(name):
    before = spec(**EVERYTHING)
    kept = before.model_dump()
    after, sentence = mitigate.apply(before, name)
    assert before.model_dump() == kept, "a pure function"
    assert after != before and sentence and sentence == sentence.strip()
    text = runs.script(after, Path("/out/my-lora"), platform="linux")
    assert text != runs.script(before, Path("/out/my-lora"), platform="linux")
    told = {"cache_aside": {"block-swap", "cache-in-memory"}, "no_block_swap": set()}.get(name, {"block-swap"})
    assert {f.id for f in lint(text)} == told
    for _ in range(2):  # the last rung is reached, or the next differs
        after = mitigate.apply(after, name)[0]
    if name != "lower_lr":
        assert mitigate.apply(after, name) == (after, "")


@pytest.mark.parametrize(
    "name",
    sorted(set(mitigate.MITIGATIONS) - {"lower_lr", "tier_down", "hub_offline", "lean", "save_local", "fp32_guard"}),
)
def test_where_there_is_nothing_to_change_the_spec_stays(name):
    plain = spec(workers=0)
    assert mitigate.apply(plain, name) == (plain, "")


def test_workers_to_zero_takes_persistent_ones_along():
    words = runs.arguments(mitigate.workers_0(spec())[0], Path("/out"), platform="linux")
    assert (
        "--persistent_data_loader_workers" not in words and words[words.index("--max_data_loader_n_workers") + 1] == "0"
    )


def test_batch_and_gpus_keep_the_effective_batch_and_the_steps():
    before = spec(**EVERYTHING)
    for name in ("batch_1", "one_gpu"):
        after = mitigate.apply(before, name)[0]
        size = [s.batch_size * s.gpus * s.gradient_accumulation for s in (before, after)]
        assert size[0] == size[1]
        assert runs.planned_steps(before, 24) == runs.planned_steps(after, 24)


def test_tiers_go_down_to_the_smallest():
    made, seen = spec(tier="20G"), []
    while (step := mitigate.tier_down(made))[1]:
        made = step[0]
        seen.append(made.tier)
    assert seen == ["16G", "12G"]


def test_states_of_another_optimizer_or_other_blocks_do_not_fit():
    base = spec(tier="20G")
    assert not mitigate.same_state(base, base.changed(tier="16G"))
    assert not mitigate.same_state(base.changed(tier="16G"), base.changed(tier="12G"))
    assert not mitigate.same_state(base, base.changed(rank=8))
    for name in set(mitigate.MITIGATIONS) - {"tier_down"}:
        before = spec(**EVERYTHING)
        assert mitigate.same_state(before, mitigate.apply(before, name)[0]), name


def test_trackers_go_offline_and_then_away():
    offline, said = mitigate.trackers_offline(spec(trackers="wandb"))
    assert "export WANDB_MODE=offline" in runs.script(offline, Path("/out"), platform="linux") and "wandb" in said
    assert mitigate.trackers_offline(offline)[0].trackers == ""
    assert mitigate.trackers_offline(spec(trackers="tensorboard"))[0].trackers == ""


def test_states_written_locally_reach_the_runs_folder_and_the_exit_code_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(mitigate, "STAGING", str(tmp_path / "it's local"))
    folder = tmp_path / "my lora"
    folder.mkdir()
    made, _ = mitigate.save_local(spec())
    launcher = tmp_path / "accelerate"
    launcher.write_text(
        '#!/bin/sh\nwhile [ "$1" != --output_dir ]; do shift; done\nmkdir "$2/a-state"\necho x > "$2/a-state/w"\nexit 9\n'
    )
    launcher.chmod(0o755)
    script = tmp_path / "train.sh"
    script.write_text(runs.script(made, folder, platform="linux"))
    assert run_script(script, launcher).returncode == 9
    assert (folder / "a-state/w").read_text() == "x\n"
    assert "xcopy" in runs.script(made, Path("C:/x"), platform="win32")


def test_a_name_that_does_not_exist_is_refused():
    with pytest.raises(runs.RunError, match="there are: workers_0"):
        mitigate.apply(spec(), "hope")


def test_every_mitigation_that_the_monitor_names_exists():
    causes = Path(presets.ROOT) / "monitor/causes.toml"
    named = {name for row in presets.tables.read_toml(causes)["cause"] for name in row.get("ladder", [])}
    assert named and named <= set(mitigate.MITIGATIONS)
