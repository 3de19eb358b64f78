"""Train, kill and resume runs of sd-scripts, and compare the output of two runs."""

import hashlib
import json
import shutil
import signal
from pathlib import Path

import numpy
import patches_helpers as helpers
import tiny_families
import tiny_sd_scripts as tiny
from trainer_helpers import metrics

from guards import checkpoint, heartbeat
from sd_scripts_patches import trainer_state


def train(work, out, *more: str, die_after=0, faults="", patched=True, env=(), code: int | None = 0, **changed: str):
    """Run one process of FLUX, which exits with `code`. Output, losses and metrics of all attempts are in `out`.

    die_after: SIGKILL from inside after that many micro-batches: the test determines the moment, and no cleanup runs.
    """
    out.mkdir(exist_ok=True)
    settings = {"TINY_LOSSES": str(out / "losses"), "TINY_DIE_AFTER": str(die_after), "HANGPROOF_RUN": str(out)}
    line = tiny.arguments(work, out / "made", *more, **changed)
    environment = tiny.environment(work, TINY_FAULTS=faults, **{**settings, **dict(env)})
    return helpers.watch(tiny.command(*line, patched=patched), environment, tiny.checkout(), 400, code)


def train_family(name, out, *more: str, images=None, patched=True, env=(), code: int | None = 0, **changed: str | None):
    """Run one process of another family of sd-scripts. images: with their caches, else those of `out`."""
    work, images = tiny_families.workdir(name), images or out / "images"
    if not images.exists():
        tiny.copy_of(work, out)
    settings = {"TINY_LOSSES": str(out / "losses"), "HANGPROOF_RUN": str(out), **dict(env)}
    line = tiny_families.arguments(name, work, images, out / "made", *more, **changed)
    command = tiny.command(*line, patched=patched, script=tiny_families.table()[name]["script"])
    return helpers.watch(command, tiny_families.environment(name, work, **settings), tiny.checkout(), 400, code)


def followed(out: Path) -> dict[str, str]:
    """The variables of a run whose beats, phases and check points are kept in `out`."""
    inject = {"HANGPROOF_INJECT": "request_injectors:phases", "PHASES_FILE": str(out / "phases")}
    return {"HANGPROOF_HEARTBEAT": str(out / "hb"), **inject}


def phases(out: Path) -> list[str]:
    """The phases of a run in the order in which it first reached them."""
    return list(dict.fromkeys((out / "phases").read_text().split()))


def tensors(path: Path) -> dict[str, str]:
    """Return a digest of each tensor of a safetensors file; its metadata (times, session numbers) is left out."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    return {name: hashlib.sha256(body[slice(*entry["data_offsets"])]).hexdigest() for name, entry in header.items()}


def samples(out: Path) -> dict[str, set[bytes]]:
    """Return sample images by name without the time. One that was made twice must be identical."""
    found: dict[str, set[bytes]] = {}
    for path in (out / "made/sample").glob("*.png"):
        found.setdefault("_".join(path.stem.split("_")[:3]), set()).add(path.read_bytes())
    return found


def names(out: Path) -> list[str]:
    """Return the names of the states and LoRAs of a run."""
    return sorted(path.name for path in (out / "made").iterdir())


def state_json(out: Path, state: str, name: str) -> dict:
    return json.loads((out / "made" / state / name).read_text())


def learning_rates(out: Path) -> dict[int, float]:
    """Return step → LR, the last entry of each step."""
    return {line["step"]: line["lr"] for line in metrics(out)}


def stripped(state: Path, folder: Path, **train_state: int) -> Path:
    """Copy a state as sd-scripts alone writes it, without our files. `train_state` replaces the content of its JSON."""
    copy = Path(shutil.copytree(state, folder / state.name))
    (copy / checkpoint.GUARD).unlink()
    (copy / trainer_state.FILE).unlink()
    if train_state:
        (copy / "train_state.json").write_text(json.dumps(train_state))
    return copy


def same_output(plain: Path, other: Path) -> None:
    """Names, LoRAs and sample images are the same."""
    assert names(other) == names(plain)
    for name in (name for name in names(plain) if name.endswith(".safetensors")):
        one, two = (tensors(out / "made" / name) for out in (plain, other))
        assert len(one) >= 6 and one == two, name
    assert samples(other) == samples(plain)


def same_training(plain: Path, guarded: Path, steps: int, images: int) -> list[str]:
    """The guarded run has the numbers of the one without patches, and its heartbeat followed it. Returns its phases."""
    losses = tiny.losses(plain / "losses")
    assert len(losses) >= steps and len({loss for *_, loss in losses}) > 0.7 * steps
    assert tiny.losses(guarded / "losses") == losses
    same_output(plain, guarded)
    assert len(samples(plain)) == images and not (plain / "hb").exists()
    (beat,) = heartbeat.read_all(guarded / "hb")
    assert (beat.outcome, beat.step, beat.planned, beat.count) == ("done", steps, steps, steps)
    assert list(learning_rates(guarded)) == list(range(1, steps + 1))
    return phases(guarded)


def same_caches(plain: Path, guarded: Path) -> None:
    """The caches (npz) beside the images hold the same numbers."""
    caches = sorted(path.relative_to(plain) for path in plain.rglob("*.npz"))
    assert caches == sorted(path.relative_to(guarded) for path in guarded.rglob("*.npz"))
    for name in caches:
        one, other = numpy.load(plain / name), numpy.load(guarded / name)
        assert one.files == other.files and all(numpy.array_equal(one[key], other[key]) for key in one.files), name


PHASES = ["cache_latents", "cache_text", "hash", "first_step", "step"]


def same_family(name: str, folder: Path) -> Path:
    """Train a family of sd-scripts on tiny weights, by its own script, without and with the patches, and compare.

    Returns the folder of the guarded run.
    """
    plain, guarded = folder / "plain", folder / "guarded"
    for out in (plain, guarded):
        train_family(name, out, patched=out == guarded, env=followed(out))
    reached = same_training(plain, guarded, tiny_families.STEPS, 2)
    assert set(reached) == {"import", "load", *PHASES, "sample", "save", "end"}
    assert [phase for phase in reached if phase in PHASES] == PHASES
    same_caches(plain, guarded)
    return guarded


INTERVAL = 3  # steps between two states


def disturbed(train, base: Path) -> tuple[Path, Path]:
    """An uninterrupted run, and one that is stopped on request at step 4, between two saves, and resumed; killed with
    SIGKILL seven micro-batches later, in its second epoch; and resumed again.

    train(out, *more, die_after=0, env=(), code=0) is one process.
    """
    plain, other = base / "plain", base / "disturbed"
    asked = {"HANGPROOF_HEARTBEAT": str(base / "hb"), "HANGPROOF_INJECT": "benchmarks.injector:fire"}
    asked |= {"HANGPROOF_FAULT": "stop_requested", "HANGPROOF_FAULT_STEP": "4"}
    train(plain)
    stopped = train(other, env=asked, code=3)
    assert "stop requested: saving a state at step 4" in stopped.log
    (beat,) = heartbeat.read_all(base / "hb")
    state = checkpoint.newest_valid(other / "made")
    assert (beat.outcome, beat.step, state.name) == ("stopped", 4, "tiny-step00000004-state")
    train(other, "--resume", str(state), die_after=7, code=-signal.SIGKILL)
    train(other, "--resume", str(checkpoint.newest_valid(other / "made")))
    state.rename(base / state.name)  # the other run has none of this step
    return plain, other


def same_run(plain: Path, other: Path, accumulation: int, images: int, epochs: int) -> None:
    """The disturbed run ended as the uninterrupted one: losses, learning rates, output, and what our file in each state
    holds (counts, averages, generators, order), so that a tenth resume goes on in the same way."""
    expected = {(epoch, step): loss for epoch, step, loss in tiny.losses(plain / "losses")}
    assert len(tiny.losses(plain / "losses")) == len(expected) == images * epochs
    found = tiny.losses(other / "losses")
    assert {(epoch, step) for epoch, step, _ in found} == set(expected)
    assert [entry for entry in found if expected[entry[0], entry[1]] != entry[2]] == []
    assert 0 < len(found) - len(expected) <= INTERVAL * accumulation, "only what was not yet saved is repeated"
    rates = learning_rates(plain)
    assert len(rates) == -(-images // accumulation) * epochs and learning_rates(other) == rates
    same_output(plain, other)
    assert sorted(samples(plain)) == [f"tiny_e{epoch:06d}_00" for epoch in range(1, epochs + 1)]
    states = [name for name in names(plain) if name.endswith("-state")]
    assert len(states) > 6
    for name in states:
        one, two = (state_json(out, name, trainer_state.FILE) for out in (plain, other))
        del one["extra"]["logs"], two["extra"]["logs"]  # kohya's trainers name it by the time of the start
        assert one == two and checkpoint.problems(other / "made" / name, deep=True) == [], name
