"""Every family of sd-scripts, tiny weights, CPU, its own script: the same numbers with all patches, two SIGKILLs, its LoRA.

For each family these processes run, two families at a time: one that makes the weights, a run without the patches, one
with all of them, one that is killed twice and resumed, and one that starts from the LoRA of the first.
"""

import functools
import shutil
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import numpy
import patches_helpers as helpers
import pytest
import resume_helpers
import tiny_families as families
import tiny_sd_scripts as tiny

from guards import checkpoint, heartbeat
from sd_scripts_patches import compatibility, registry

pytestmark = [
    pytest.mark.skipif(bool(tiny.why_not()), reason=tiny.why_not() or "-"),
    pytest.mark.timeout(1800),  # the first test of a family waits for its processes
]
NAMES = tuple(families.FAMILIES)
KILLS = (5, 4)
"""Losses after which the first and the second process are killed: in step 5, and resumed from step 3, in step 7."""

PHASES = ["cache_latents", "cache_text", "hash", "first_step", "step"]


@dataclass(frozen=True)
class Runs:
    """The folders of a family's runs, and the log of the one that started from its LoRA."""

    plain: Path
    guarded: Path
    killed: Path
    kills: int
    loaded: Path
    log: str


def train(name: str, out: Path, *more: str, patched: bool = True, die_after: int = 0, env=(), **changed):
    """Train a family into `out`, which keeps losses, metrics and images. Returns helpers.RunResult."""
    work = families.workdir(name)
    out.mkdir(exist_ok=True)
    if not (out / "images").exists():
        tiny.copy_of(work, out)
    settings = {"TINY_LOSSES": str(out / "losses"), "HANGPROOF_RUN": str(out), **dict(env)}
    faults = ""
    if die_after:
        (out / "die.py").write_text(resume_helpers.DIE)
        settings["DIE_AFTER"] = str(die_after)
        faults = f"{tiny.home('LossRecorder')}={out / 'die.py'}"
    arguments = families.arguments(name, work, out / "images", out / "made", *more, **changed)
    environment = families.environment(name, work, faults, **settings)
    return helpers.watch(families.command(name, arguments, patched), environment, tiny.checkout(), timeout_s=400)


def killed_twice(name: str, out: Path) -> int:
    """Kill a run twice, resume it each time, let it finish. Returns how often it was killed."""
    resume: list[str] = []
    for killed, die_after in enumerate((*KILLS, 0)):
        result = train(name, out, *resume, die_after=die_after)
        if result.code == 0:
            return killed
        assert result.code == -signal.SIGKILL, result.log[-3000:]
        newest = checkpoint.newest_valid(out / "made")
        assert newest is not None, "the killed run has left no complete state"
        resume = ["--resume", str(newest)]
    raise AssertionError(result.log[-3000:])


def from_lora(name: str, out: Path, lora: Path):
    """One step from a LoRA with a learning rate that is 0 in float32, sample images that have no time, and a hub that
    accepts connections and never answers.

    With --dim_from_weights the family's network module reads the file twice: for its shape, then for its weights.
    """
    shutil.copytree(lora.parent.parent / "images", out / "images")  # with its caches
    with socket.create_server(("127.0.0.1", 0)) as silent:
        online = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        return train(
            name, out, "--network_weights", str(lora), "--dim_from_weights", "--sample_at_first",
            env={"HANGPROOF_SAMPLE_BUDGET_S": "0.001", "HANGPROOF_HUB_TIMEOUT_S": "60", **online},
            learning_rate="1e-60", max_train_epochs=None, max_train_steps="1",
        )  # fmt: skip


def run_all(name: str, base: Path) -> Runs:
    """Train a family in every way that the tests look at."""
    plain, guarded, killed, loaded = (base / run for run in ("plain", "guarded", "killed", "loaded"))
    for out in (plain, guarded):
        phases = {"HANGPROOF_INJECT": "patches_injectors:phases", "PHASES_FILE": str(out / "phases")}
        result = train(name, out, patched=out == guarded, env={"HANGPROOF_HEARTBEAT": str(out / "hb"), **phases})
        assert result.code == 0, result.log[-3000:]
    kills = killed_twice(name, killed)
    loaded.mkdir()
    result = from_lora(name, loaded, plain / "made/tiny.safetensors")
    assert result.code == 0, result.log[-3000:]
    return Runs(plain, guarded, killed, kills, loaded, result.log)


@pytest.fixture(scope="module")
def all_runs(request, tmp_path_factory):
    base = tmp_path_factory.mktemp("families")
    jobs = {}
    for name in NAMES:
        if not families.why_not(name):
            (base / name).mkdir()
            jobs[name] = functools.partial(run_all, name, base / name)
    with helpers.ahead(request, "runs", jobs) as futures:
        yield futures


@pytest.fixture
def runs(request, all_runs):
    """The runs of one family."""
    if request.param not in all_runs:
        pytest.skip(families.why_not(request.param))
    return all_runs[request.param].result()


every_family = helpers.asks("runs", *NAMES)


@every_family
def test_ten_steps_have_identical_losses(runs):
    plain, guarded = (tiny.losses(out / "losses") for out in (runs.plain, runs.guarded))
    assert len(plain) == families.STEPS and len({loss for _, _, loss in plain}) == families.STEPS
    assert plain == guarded


@every_family
def test_lora_caches_and_samples_are_identical(runs):
    plain, guarded = (resume_helpers.tensors(out / "made/tiny.safetensors") for out in (runs.plain, runs.guarded))
    assert len(plain) > 10 and plain == guarded
    caches = sorted(path.relative_to(runs.plain) for path in runs.plain.rglob("*.npz"))
    assert caches == sorted(path.relative_to(runs.guarded) for path in runs.guarded.rglob("*.npz"))
    for name in caches:
        one, other = numpy.load(runs.plain / name), numpy.load(runs.guarded / name)
        assert one.files == other.files and all(numpy.array_equal(one[k], other[k]) for k in one.files), name
    pictures = [resume_helpers.samples(out) for out in (runs.plain, runs.guarded)]
    assert sorted(pictures[0]) == ["tiny_000005_00", "tiny_000010_00"] and pictures[0] == pictures[1]


@every_family
def test_two_kills_leave_the_undisturbed_losses_rates_lora_and_samples(runs):
    plain, killed = (tiny.losses(out / "losses") for out in (runs.guarded, runs.killed))
    expected = {(epoch, step): loss for epoch, step, loss in plain}
    assert runs.kills == len(KILLS) and len(killed) == sum(KILLS) + 4
    assert [entry for entry in killed if expected[entry[0], entry[1]] != entry[2]] == []
    assert {(epoch, step) for epoch, step, _ in killed} == set(expected)
    assert resume_helpers.learning_rates(runs.killed) == resume_helpers.learning_rates(runs.guarded)
    assert resume_helpers.names(runs.killed) == resume_helpers.names(runs.guarded)
    for name in resume_helpers.names(runs.guarded):
        if name.endswith(".safetensors"):
            both = [resume_helpers.tensors(out / "made" / name) for out in (runs.guarded, runs.killed)]
            assert both[0] == both[1], name
    assert resume_helpers.samples(runs.killed) == resume_helpers.samples(runs.guarded)


@every_family
def test_its_own_loader_reads_the_lora(runs):
    """Nothing is learned, so the LoRA that is saved is the one that was read, to the digit."""
    lora = runs.plain / "made/tiny.safetensors"
    assert f"load network weights from {lora}: <All keys matched successfully>" in runs.log, runs.log[-3000:]
    assert resume_helpers.tensors(runs.loaded / "made/tiny.safetensors") == resume_helpers.tensors(lora)


@every_family
def test_a_sample_image_over_its_budget_is_skipped_in_the_familys_own_loop(runs):
    skipped = "sample image 1 skipped: BudgetExceeded: the budget of 0.001 s was exceeded after"
    assert runs.log.count(skipped) == 1, runs.log[-3000:]
    assert not list((runs.loaded / "made").rglob("*.png"))


@every_family
def test_the_heartbeat_follows_the_run(runs):
    (beat,) = heartbeat.read_all(runs.guarded / "hb")
    assert (beat.outcome, beat.step, beat.planned, beat.count) == ("done", *[families.STEPS] * 3)
    assert len(resume_helpers.learning_rates(runs.guarded)) == families.STEPS
    seen = (runs.guarded / "phases").read_text().split()
    assert set(seen) == {"import", "load", *PHASES, "sample", "save", "end"}
    assert [phase for phase in dict.fromkeys(seen) if phase in PHASES] == PHASES


@pytest.mark.parametrize("name", NAMES)
def test_check_finds_its_script_guarded(name):
    if families.why_not(name):
        pytest.skip(families.why_not(name))
    work, out = Path("work"), Path("out")
    arguments = families.arguments(name, work, work / "images", out)
    refusal, spared = compatibility.refusal(registry.patches(), tiny.checkout(), arguments, strict=True)
    assert (refusal, spared) == ("", [])
