"""A mitigation changes one thing, says so, is done once, and leaves a spec that renders and lints clean."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from monitor_helpers import wait_for
from runs_helpers import contents, executable, run_script, spec

import runs
from presets.lint import lint
from runs import custom_script, mitigate, staging


def same_state(before, after) -> bool:
    """Whether the run of one spec goes on from a state of the other."""
    return mitigate.same_state(*(runs.resolve(one, Path("/out")) for one in (before, after)))


EVERYTHING = {
    "backend": "sd-scripts", "tier": "20G", "batch_size": 4, "gpus": 2, "prompts": ["x"], "sample_every_n_steps": 5,
    "trackers": "wandb", "mixed_precision": "fp16", "gradient_accumulation": 3,
    "validation_split": 0.1, "extra": {"blocks_to_swap": 18, "sample_at_first": True},
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
    expected = {"cache_aside": {"block-swap", "cache-in-memory"}, "no_block_swap": set()}.get(name, {"block-swap"})
    assert {f.id for f in lint(text)} == expected
    for _ in range(2):  # the last rung is reached, or the next differs
        after = mitigate.apply(after, name)[0]
    if name != "lower_lr":
        assert mitigate.apply(after, name) == (after, "")


def in_force(made: "runs.RunSpec", flag: str) -> list[str] | None:
    """The values of a flag in the script; None where it is absent."""
    text = runs.script(made, Path("/out"), platform="linux")
    return custom_script.flags(custom_script.only(text, "linux")).get(flag)


def test_a_smaller_tier_is_not_undone_by_extra_flags():
    extra = {"optimizer_type": "AdamW", "optimizer_args": ["weight_decay=0.1"], "guidance_scale": 2.0}
    after, sentence = mitigate.apply(spec(tier="20G", extra=extra), "tier_down")
    assert in_force(after, "optimizer_type") == ["adafactor"] and in_force(after, "guidance_scale") == ["2"]
    assert "relative_step=False" in (in_force(after, "optimizer_args") or [])
    assert "without --optimizer_type, without --optimizer_args" in sentence
    extra = {"network_args": ["train_blocks=all", "rank_dropout=0.1"], "split_mode": False, "blocks_to_swap": 18}
    after, _ = mitigate.apply(spec(tier="16G", backend="sd-scripts", extra=extra), "tier_down")
    assert in_force(after, "split_mode") == [] and in_force(after, "blocks_to_swap") is None
    assert in_force(after, "network_args") == ["rank_dropout=0.1", "train_blocks=single"]


ALWAYS = {"lower_lr", "tier_down", "hub_offline", "lean", "save_local", "fp32_guard"}  # even of a plain spec
OWN_RATE = [  # optimizers that find their own rate: there is none to lower
    {"optimizer_args": ["scale_parameter=False"]},
    {"optimizer_type": "Adafactor", "optimizer_args": ["relative_step=True"]},
    {"optimizer_args": ["relative_step=False", "warmup_init=True"]},
]


def test_a_mitigation_that_changes_nothing_for_the_trainer_says_so():
    for name, fields in (
        *(("lower_lr", {"tier": "16G", "backend": "diffusers", "extra": extra}) for extra in OWN_RATE),
        *((name, {"workers": 0, "backend": "diffusers"}) for name in sorted(mitigate.MITIGATIONS.keys() - ALWAYS)),
        ("no_block_swap", {"extra": {"blocks_to_swap": "0"}}),
        ("validation_off", {"validate_every_n_steps": 5}),
        ("hub_offline", {"environment": {"HF_HUB_OFFLINE": "true"}}),
        ("fp32_guard", {"mixed_precision": "no"}),
        ("cache_aside", {"extra": {"cache_latents_to_disk": False, "cache_text_encoder_outputs_to_disk": False}}),
    ):
        before = spec(**{"backend": "sd-scripts", **fields})
        assert mitigate.apply(before, name) == (before, "")


PERSISTENT, HALF = "persistent_data_loader_workers", "0.0004 instead of 0.0008"
FP16 = {"mixed_precision": "fp16", "extra": {"full_fp16": True}}


def test_what_an_extra_flag_asks_for_is_changed_too():
    for name, fields, flags, says in (
        *(("lower_lr", {"backend": backend, "learning_rate": 8e-4, "extra": {"unet_lr": 2e-4}},
           {"unet_lr": ["0.0001"], "learning_rate": ["0.0004"]}, f"learning rate {HALF}, unet_lr 0.0001 instead of 0.0002")
          for backend in ("sd-scripts", "diffusers")),
        ("lower_lr", {"extra": {"text_encoder_lr": ["1e-4", "5e-5"]}}, {"text_encoder_lr": ["5e-05", "2.5e-05"]},
         "text_encoder_lr 5e-05 2.5e-05 instead of 1e-4 5e-5"),
        ("batch_1", {"extra": {"vae_batch_size": 8}}, {"vae_batch_size": ["1"]}, ""),
        ("fp32_guard", FP16, {"mixed_precision": ["bf16"], "full_fp16": None}, ""),
        ("hub_offline", {"extra": {"async_upload": True}}, {"async_upload": None}, ""),
        ("workers_0", {"extra": {PERSISTENT: True}}, {PERSISTENT: None}, ""),
    ):  # fmt: skip
        after, sentence = mitigate.apply(spec(**{"backend": "sd-scripts", **fields}), name)
        assert sentence and says in sentence and {flag: in_force(after, flag) for flag in flags} == flags
        assert name == "lower_lr" or mitigate.apply(after, name) == (after, "")


def test_each_rung_ends_at_the_last():
    with pytest.raises(runs.RunError, match="there are: workers_0"):
        mitigate.apply(spec(), "hope")
    made, seen = spec(tier="20G"), []
    while (step := mitigate.apply(made, "tier_down"))[1]:
        made = step[0]
        seen.append(made.tier)
    assert seen == ["16G", "12G"]
    offline, sentence = mitigate.apply(spec(trackers="wandb"), "trackers_offline")
    assert "export WANDB_MODE=offline" in runs.script(offline, Path("/out"), platform="linux") and "wandb" in sentence
    assert mitigate.apply(offline, "trackers_offline")[0].trackers == ""
    assert mitigate.apply(spec(trackers="tensorboard"), "trackers_offline")[0].trackers == ""


def test_states_of_another_optimizer_or_other_blocks_do_not_fit():
    base = spec(tier="20G")
    assert not same_state(base, base.changed(tier="16G"))
    assert not same_state(base.changed(tier="16G"), base.changed(tier="12G"))
    assert not same_state(base, base.changed(rank=8))
    before = spec(**EVERYTHING)
    for name in set(mitigate.MITIGATIONS) - {"tier_down"}:
        after = mitigate.apply(before, name)[0]
        assert same_state(before, after), name
        assert runs.planned_steps(before, {"": 24}) == runs.planned_steps(after, {"": 24}), name


TRAINER = """#!/bin/sh
while [ "$1" != --output_dir ]; do shift; done
mkdir -p "$2/my-lora-state" "$2/sample"
printf new-state > "$2/my-lora-state/weights"
printf new-lora > "$2/my-lora.safetensors"
printf new-image > "$2/sample/2.png"
printf partial > "$2/.my-lora.safetensors.1.tmp"
exit "${CODE:-0}"
"""
# A `cp` that stops in the middle of the file $STALL and says so by creating $STALLED.
SLOW_COPY = """#!/bin/sh
/bin/cp "$@" || exit 1
for target; do :; done
place=$(find "$target" -name "*$STALL*")
[ -z "$place" ] || { printf new > "$place"; touch "$STALLED"; sleep 300; }
"""


@pytest.fixture
def saved_locally(tmp_path, monkeypatch):
    """A script that saves locally, its launcher, and the run's folder with results of an earlier attempt."""
    monkeypatch.setattr(staging, "PARENT", tmp_path / "it's local")
    (tmp_path / "it's local").mkdir()
    folder, launcher, script = tmp_path / "my lora", tmp_path / "accelerate", tmp_path / "train.sh"
    for name in ("my-lora-state/weights", "my-lora-state/only-in-the-old-one", "sample/1.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("old")
    executable(launcher, TRAINER)
    script.write_text(runs.script(mitigate.apply(spec(), "save_local")[0], folder, platform="linux"))
    return script, launcher, folder


NEW = {"my-lora-state/weights": b"new-state", "my-lora.safetensors": b"new-lora"}
NEW |= {"sample/1.png": b"old", "sample/2.png": b"new-image"}


def with_copy(folder: Path, text: str) -> str:
    """A PATH on which `cp` is this program."""
    return f"{executable(folder / 'programs' / 'cp', text).parent}:{os.environ['PATH']}"


@pytest.mark.parametrize("stall", ["my-lora.safetensors", "weights", "2.png"])
def test_a_copy_that_is_killed_leaves_nothing_truncated_and_the_next_one_completes_it(saved_locally, tmp_path, stall):
    script, launcher, folder = saved_locally
    path, stalled = with_copy(tmp_path, SLOW_COPY), tmp_path / "stalled"
    env = {**os.environ, "PATH": path, "STALL": stall, "STALLED": str(stalled), "TRAINER_PYTHON": str(launcher)}
    process = subprocess.Popen(["bash", str(script)], env=env, start_new_session=True)
    try:
        wait_for(stalled.exists, 60, "the copy reaches the file")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
    old = dict.fromkeys(("my-lora-state/weights", "my-lora-state/only-in-the-old-one", "sample/1.png"), b"old")
    shown = {name: text for name, text in contents(folder).items() if not f"/{name}".count("/.")}
    assert all(text in (old.get(name), NEW.get(name)) for name, text in shown.items()), shown
    done = run_script(script, launcher, CODE="9")
    assert (done.returncode, done.stderr) == (9, b"") and contents(folder) == NEW, "the training's exit code stays"


def test_a_copy_that_fails_is_an_error_even_where_the_training_succeeded(saved_locally, tmp_path):
    script, launcher, folder = saved_locally
    path = with_copy(tmp_path, "#!/bin/sh\necho 'cp: No space left on device' >&2\nexit 1\n")
    before = contents(folder)
    done = run_script(script, launcher, PATH=path)
    assert done.returncode == 1 and b"error: results could not be copied" in done.stderr
    assert run_script(script, launcher, PATH=path, CODE="9").returncode == 9
    assert contents(folder) == before


def test_a_batch_file_copies_under_another_name_first():
    made = spec(save_dir="D:/local 100%/x")
    lines = runs.script(made, Path("C:/x"), platform="win32").split("\r\n")
    (lora,) = [line for line in lines if line.startswith("for %%F")]
    assert 'in ("D:\\local 100%%\\x\\*")' in lora
    assert 'copy /b /y "%%F" "C:\\x\\.%%~nxF.tmp"' in lora and 'move /y "C:\\x\\.%%~nxF.tmp" "C:\\x\\%%~nxF"' in lora
    assert 'xcopy /e /i /y /q "D:\\local 100%%\\x\\%~1" "C:\\x\\.%~1.tmp" >nul || exit /b 1' in lines
    assert lines[lines.index(":copy_state") - 2] == "exit /b %code%" and not any("\n" in line for line in lines)
    assert runs.script(spec(), Path("C:/x"), platform="win32").endswith("\r\nexit /b %ERRORLEVEL%\r\n")


def test_one_gpu_keeps_the_machines_and_the_effective_batch():
    several = spec(nodes=2, gpus=2, gradient_accumulation=2)
    alone, _ = mitigate.apply(several, "one_gpu")
    assert (alone.nodes, alone.gpus, alone.gradient_accumulation) == (2, 1, 4)
    assert runs.planned_steps(alone, {"": 30}) == runs.planned_steps(several, {"": 30})
    for backend, seeds in (("diffusers", {}), ("sd-scripts", {"HANGPROOF_BATCH_SEEDS": "1"})):  # the noise of several
        alone, _ = mitigate.apply(spec(gpus=2, backend=backend, environment={"A": "1"}), "one_gpu")
        assert alone.environment == {"A": "1", **seeds}
