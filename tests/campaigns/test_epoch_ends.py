"""Killed at an epoch's end, one step before and one after, a run goes on as the undisturbed one, loss by loss.

A case is an undisturbed run and one that is ended ten times: by SIGKILL after a save by steps, a save by epochs or a
snapshot in memory, and by a pause; at each of them before, at and after an epoch's end, in an order that the seed
shuffles. All losses, the learning rates and the LoRA are compared. Runs are forked from a process that has
done their imports.

The campaign: all families of a checkout, gradient accumulation 1 and 2, loaders without workers, with new ones each
epoch, and with workers that stay. HANGPROOF_SEED repeats an order of the kills.

    python -m pytest -s tests/campaigns/test_epoch_ends.py [-k "sd-scripts and sdxl"]          3 hours
"""

import functools
import json
import random
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import musubi_helpers
import pytest
import resume_helpers
import tiny_families
import tiny_musubi
import tiny_sd_scripts
import trainer_helpers
from seeds import seed

from guards import checkpoint, snapshot_files
from sd_scripts_patches import trainer_state
from trainer import tiny_flux

pytestmark = [pytest.mark.timeout(3000), pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")]
ENDS = (1, 2, 4, 5, 6, 7, 9, 10, 11, 12)  # a resumed run passes the end of one epoch or of two; one more epoch follows
POINTS = [*((kind, offset) for kind in ("step", "snapshot", "pause") for offset in (-1, 0, 1)), ("epoch", 0)]
WORKERS = {
    "none": {"max_data_loader_n_workers": "0"},
    "new": {"max_data_loader_n_workers": "2"},
    "stay": {"max_data_loader_n_workers": "2", "persistent_data_loader_workers": True},
}
LOADING = [(1, "none"), (1, "stay"), (2, "new"), (2, "stay")]
"""Gradient accumulation, and workers: new ones each epoch, or those of the first one."""
Run = Callable[..., object]
"""Of a family of a trainer: run(out, env=variables, code=exit code, **flags) trains into `out`, or fails."""


@functools.lru_cache
def sd_scripts(name: str) -> Run:
    if reason := tiny_sd_scripts.why_not() if name == "flux" else tiny_families.why_not(name):
        pytest.skip(reason)
    if name == "flux":
        return functools.partial(resume_helpers.train, tiny_sd_scripts.workdir(5))
    work = tiny_families.workdir(name)
    images = tiny_sd_scripts.copy_of(work, Path(tempfile.mkdtemp(dir=work)))
    off = dict.fromkeys(("save_every_n_steps", "sample_every_n_steps", "sample_prompts"))
    run = functools.partial(resume_helpers.train_family, name, images=images, **off)
    # Its caches are made once; a run that makes those on the disk draws other numbers.
    train(run, Path(tempfile.mkdtemp(dir=work)), "never", {"max_train_epochs": "1"})
    return run


@functools.lru_cache
def musubi(name: str) -> Run:
    if reason := tiny_musubi.why_not():
        pytest.skip(reason)

    def run(out: Path, **given: object) -> object:
        if not (out / "dataset.toml").exists():
            tiny_musubi.cached(tiny_musubi.workdir(name), out, family=name)
        return musubi_helpers.train(out, family=name, **given)

    return run


@functools.lru_cache
def built_in(name: str) -> Run:
    work = Path(tempfile.mkdtemp(prefix="tiny-built-in-"))
    model = tiny_flux.ensure(work / "models" / "tiny-flux")
    config = trainer_helpers.make_config(work / "dataset.toml", trainer_helpers.make_images(work / "images"), repeats=1)

    def run(out: Path, env: dict, code: int, **flags: object) -> None:
        flags = {"max_train_steps": None, "network_dropout": 0.1, **flags}
        done = trainer_helpers.fork(trainer_helpers.flags(model, config, out / "made", **flags), **env)
        assert done.returncode == code, (done.stdout + done.stderr)[-3000:]

    return run


TRAINERS = {  # how it runs, its families, the batches of an epoch
    "built-in": (built_in, ["flux"], 5),
    "sd-scripts": (sd_scripts, ["flux", *tiny_families.table()], 5),
    "musubi": (musubi, [*tiny_musubi.FAMILIES], 7),
}


def train(run: Run, out: Path, kill: str, flags: dict, **variables: str) -> None:
    """Run one process. It has to end as `kill` says (epoch_end_kills.py)."""
    out.mkdir(exist_ok=True)
    attempt = len(list(out.glob("beats-*")))
    beats = out / f"beats-{attempt}"
    variables |= {"HANGPROOF_RUN": str(out), "HANGPROOF_HEARTBEAT": str(beats), "HANGPROOF_ATTEMPT": str(attempt + 1)}
    variables |= {"HANGPROOF_INJECT": "epoch_end_kills:fire", "TEST_KILL": kill}
    expected = {"never": 0, "pause": 3}.get(kill.split()[0], -signal.SIGKILL)
    run(out, env=variables, code=expected, **{"save_state": True, **flags})


def ended_at(run: Run, out: Path, points: list[tuple[int, str, int]], steps: int, flags: dict) -> None:
    """End a run at each of `points` (epoch, what leaves the state, offset in steps), resume it each time, finish it."""
    resume: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="hangproof-test-", dir="/dev/shm") as ring:
        memory = Path(ring)
        variables = {snapshot_files.RING: str(memory)}
        for epoch, kind, offset in points:
            step = epoch * steps + offset
            saves = {"step": {"save_every_n_steps": str(step)}, "epoch": {"save_every_n_epochs": str(epoch)}}
            train(run, out, f"{kind} {step}", {**flags, **resume, **saves.get(kind, {})}, **variables)
            if kind == "snapshot":
                path, guard = next(iter(checkpoint.guards(memory).items()))
                state, found = memory / snapshot_files.RESUMED / path.name, guard["step"]
            else:
                state = checkpoint.newest_valid(out / "made")
                found = checkpoint.guard_of(state)["step"]
            assert found == step, (kind, step, state)
            resume = {"resume": str(state)}
        train(run, out, "never", {**flags, **resume}, **variables)


def losses(out: Path) -> list[tuple[int, tuple[float, float]]]:
    """Return (step, (loss, learning rate)) of every step that was trained, in all attempts."""
    return [(line["step"], (line["loss"], line["lr"])) for line in trainer_helpers.metrics(out)]


@pytest.mark.parametrize("trainer", ["sd-scripts", "musubi"])
def test_a_state_of_two_processes_goes_on_in_one_with_the_order_of_its_epoch_with_workers_that_stay(trainer, tmp_path):
    """Random numbers follow from the batch. The state of the other shape holds no order, so it is drawn: in the middle
    of an epoch, and after its last step."""
    make, (name, *_), batches = TRAINERS[trainer]
    run, seeds, steps = make(name), {"HANGPROOF_BATCH_SEEDS": "1"}, -(-batches // 2)
    flags = {"max_train_epochs": "4", "gradient_accumulation_steps": "2", **WORKERS["stay"]}
    train(run, tmp_path / "plain", "never", {**flags, "save_every_n_steps": "1"}, **seeds)
    expected = dict(losses(tmp_path / "plain"))
    for step in (steps + 1, 2 * steps):
        state = tmp_path / "plain" / "made" / f"tiny-step{step:08d}-state"
        (state / checkpoint.GUARD).unlink()  # it has a hash of the file that changes
        saved = json.loads((state / trainer_state.FILE).read_text())
        saved |= {"processes": 2, "accumulation": 1, "batches": steps, "batch": -(-saved["batch"] // 2)}
        (state / trainer_state.FILE).write_text(json.dumps(saved))
        train(run, tmp_path / str(step), "never", {**flags, "resume": str(state)}, **seeds)
        assert losses(tmp_path / str(step)) == [(at, value) for at, value in expected.items() if at > step], step


@pytest.mark.parametrize(("accumulation", "workers"), LOADING)
@pytest.mark.parametrize(("trainer", "name"), [(t, name) for t, (_, names, _) in TRAINERS.items() for name in names])
def test_ended_before_at_and_after_an_epochs_end_no_loss_differs(trainer, name, accumulation, workers, tmp_path):
    points = list(POINTS)
    random.Random(f"{seed()}/{trainer}/{name}/{accumulation}/{workers}").shuffle(points)
    points = [(epoch, kind, offset) for epoch, (kind, offset) in zip(ENDS, points, strict=True)]
    make, _, batches = TRAINERS[trainer]
    run, steps, epochs = make(name), -(-batches // accumulation), points[-1][0] + 1
    flags = {"max_train_epochs": str(epochs), "gradient_accumulation_steps": str(accumulation), **WORKERS[workers]}
    plain, ended = tmp_path / "plain", tmp_path / "ended"
    train(run, plain, "never", flags)
    ended_at(run, ended, points, steps, flags)
    expected, found = dict(losses(plain)), losses(ended)
    differ = [step for step, value in found if expected[step] != value]
    print(f"{trainer} {name}, accumulation {accumulation}, workers {workers}, seed {seed()}: {len(found)} losses")
    assert not differ, (differ, points)
    assert len(expected) == epochs * steps and sorted({step for step, _ in found}) == sorted(expected)
    loras = [resume_helpers.tensors(out / "made" / "tiny.safetensors") for out in (plain, ended)]
    assert loras[0] == loras[1]
