"""Sweeps: which runs they make, what those share, and which files are sweeps."""

import errno
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from runs_helpers import pictures, written
from sweep_helpers import FIELDS, make

import runs
from monitor.process.spawned import idle
from runs import dataset, folders, manage, pin, sweep
from runs.files import RunError


def test_the_names_say_the_values():
    base = runs.make({"name": "cat", **FIELDS})
    specs = sweep.combinations(base, {"rank": [8, 16], "learning_rate": [1e-4, 5e-4, 1.5e-3]})
    rates = ("1e-4", "5e-4", "1.5e-3")
    assert [spec.name for spec in specs] == [f"cat-r{rank}-lr{rate}" for rank in (8, 16) for rate in rates]
    assert [(spec.rank, spec.learning_rate) for spec in specs][-1] == (16, 1.5e-3)
    assert len({spec.slug for spec in specs}) == 6
    of_japan = runs.make({**base.model_dump(), "name": "写真の女の子のための長い名前" * 3})  # 150 Latin letters
    slugs = [spec.slug for spec in sweep.combinations(of_japan, {"alpha": [1, 0.5]})]
    assert all(map(str.endswith, slugs, ("-a1", "-a0-5")))
    (short, _) = sweep.combinations(base, {"epochs": [2, 4]})
    assert (short.epochs, short.max_train_steps) == (2, None)  # else epochs would have no effect


def test_a_sweep_that_cannot_be_made_says_why():
    for texts, words in (
        ([], "at least two values"),
        (["rank=1,2", "alpha=1,2", "lr=1,2", "epochs=1,2", "seed=1,2"], "These are 32 runs; at most 24 are possible"),
        (["rank=8,x"], "'x' is not a number"),
        (["price=1,2"], "write FIELD=VALUE,VALUE with one of rank"),
        (["rank=0,8"], "rank"),
        (["learning_rate=1e-4,1.0000001e-4"], "Two runs would have the name"),
    ):
        with pytest.raises(RunError, match=words):
            sweep.combinations(runs.make({"name": "cat", **FIELDS}), sweep.parse(texts))
    with pytest.raises(RunError, match="unet_lr decides the learning rate"):
        sweep.combinations(runs.make({"name": "cat", **FIELDS, "extra": {"unet_lr": 1e-4}}), {"learning_rate": [1, 2]})


def test_a_change_that_an_edited_script_has_no_place_for_is_refused(data):
    base = runs.create(runs.make({"name": "cat", **FIELDS}), pictures(data / "photos"))
    spec, script = runs.load(base), (base / "train.sh").read_text()
    flags = f"--network_dim {spec.rank}", f"--max_train_steps {spec.max_train_steps}"
    for flag in flags:
        script = script.replace(f"  {flag} \\\n", "")
    script = script.replace("set -eu\n", f"set -eu\nmine=({' '.join(flags)})\n")
    script = script.replace("  --seed", '  "${mine[@]}" --seed')
    edited = pin.adopt(spec, script, base)
    with pytest.raises(RunError, match="--network_dim is not written in the script as a plain option"):
        sweep.combinations(edited, {"rank": [4, 8]})
    assert len(sweep.combinations(edited, {"alpha": [1, 2]})) == 2, "a plain option is changed"
    (base / "train.sh").write_text(script)
    with pytest.raises(RunError, match="--max_train_steps is not written"):
        runs.train_longer(base, 2 * spec.max_train_steps)
    assert runs.load(base) == spec


@settings(max_examples=25)
@given(st.lists(st.text(max_size=30), max_size=4), st.text(min_size=1, max_size=100))
def test_hostile_values_and_names_make_a_message_or_names_that_stay_in_the_folder(texts, name):
    try:
        base = runs.make({"name": name, **FIELDS})
        specs = sweep.combinations(base, sweep.parse([*texts, "rank=4,8"]))
    except RunError:
        return
    assert 2 <= len(specs) <= sweep.MOST
    assert all(Path(spec.slug).name == spec.slug and spec.slug[0] != "." and len(spec.slug) <= 80 for spec in specs)


def test_the_runs_share_the_images_and_one_can_be_deleted_alone(base):
    made = make(base, rank=[4, 8])
    assert made.name == "cat-sweep" and [run for run, _ in made.runs] == ["cat-r4", "cat-r8"]
    first, second = (runs.datasets_dir() / run for run, _ in made.runs)
    pairs = [(path, second / path.relative_to(first)) for path in first.rglob("*") if path.is_file()]
    assert len(pairs) == 4 and all(a.samefile(b) for a, b in pairs)  # two images with captions, once on the disk
    assert manage.usage("cat-r4").images_bytes == 0  # so deleting it frees none
    assert runs.load(runs.outputs_dir() / "cat-r8").rank == 8
    manage.delete("cat-r4", idle, images=True)
    assert all(b.is_file() for _, b in pairs)
    assert make(base, rank=[16, 32]).name == "cat-sweep-2"
    with pytest.raises(RunError, match="cat-r8"):
        make(base, rank=[64, 8])
    assert not (runs.outputs_dir() / "cat-r64").exists()  # nothing is made before all names are free


@pytest.mark.parametrize(
    ("module", "name", "at"), [(folders, "write", 2), (sweep, "link_tree", 2), (sweep, "atomic_write", 1)]
)
def test_a_sweep_is_made_completely_or_not_at_all(base, monkeypatch, module, name, at):
    calls, original, before = itertools.count(1), getattr(module, name), runs.list_runs()

    def full(*words, **more):
        if next(calls) == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*words, **more)

    with monkeypatch.context() as patch, pytest.raises(RunError, match="the disk is full"):
        patch.setattr(module, name, full)
        make(base, rank=[4, 8])
    assert runs.list_runs() == before and [path.name for path in runs.datasets_dir().iterdir()] == ["cat"]
    assert len(make(base, rank=[4, 8]).runs) == 2, "the same again, once there is space"


@pytest.mark.parametrize("subset", ["cache", "weight-3", "__MACOSX", "10_cache"])
def test_a_subset_of_any_name_is_trained_by_every_run_of_a_sweep(base, subset):
    data = runs.datasets_dir() / base.slug
    written(data / subset / "0.png", (data / "0.png").read_bytes())
    for cache in (data / ".hangproof-cache", data / subset / ".hangproof-cache"):
        written(cache / "latents-1.npz", b"of another resolution")
    made = make(base, rank=[4, 8])
    for run, _ in made.runs:
        assert dataset.counts(runs.datasets_dir() / run) == {"": 2, subset: 1}
        assert not list((runs.datasets_dir() / run).rglob("*.npz"))
        assert f"{run}/{subset}" in (runs.outputs_dir() / run / "dataset.toml").read_text(encoding="utf-8")


def test_only_caches_are_shared_and_a_removed_image_stays_removed(base):
    first, second = (runs.datasets_dir() / run for run, _ in make(base, rank=[4, 8]).runs)
    (second / "0.png").unlink()
    for name in (".hangproof-cache/latents-1.npz", "1_flux_te.npz"):
        (first / name).parent.mkdir(exist_ok=True)
        (first / name).write_bytes(b"x")
    for name in ("cache/1.safetensors", "cache/.1.tmp"):  # of musubi-tuner, and one that it still writes
        (runs.outputs_dir() / first.name / name).parent.mkdir(exist_ok=True)
        (runs.outputs_dir() / first.name / name).write_bytes(b"x")
    assert sweep.share_caches(second.name) == 3 and sweep.share_caches(second.name) == 0
    assert (runs.outputs_dir() / second.name / "cache/1.safetensors").stat().st_nlink == 2
    assert (second / ".hangproof-cache/latents-1.npz").is_file() and (second / "1_flux_te.npz").is_file()
    assert not (second / "0.png").exists()
    small, large = (runs.datasets_dir() / run for run, _ in make(base, resolution=[64, 128]).runs)
    (small / "1_flux.npz").write_bytes(b"x")
    assert sweep.share_caches(large.name) == 0, "of another resolution"
    manage.delete(second.name, idle, images=True)
    runs.create(runs.make({"name": second.name, **FIELDS}), pictures(second.parent / "other", 2))
    assert sweep.share_caches(second.name) == 0, "of other images, which have the same names"


@pytest.mark.parametrize("text", ["[]", '{"name": "x", "base": "a", "fields": [], "runs": [["../outputs", {}]]}'])
def test_a_damaged_sweep_is_none(base, text):
    written(runs.outputs_dir() / sweep.SWEEPS / "x.json", text)
    assert sweep.all_sweeps() == []
