"""kohya's real musubi-tuner under the patches: the same numbers, a heartbeat that describes the run, safe cache files."""

import ast
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import patches_helpers as helpers
import pytest
import resume_helpers
import tiny_musubi as tiny
from musubi_helpers import SORTED

from guards import checkpoint, heartbeat, startup
from sd_scripts_patches import save
from sd_scripts_patches.musubi import LOOP
from sd_scripts_patches.patch import find_function

pytestmark = pytest.mark.usefixtures("musubi")
POINTS = "arguments folders data accelerator tokenizer model network loader ready tracker ready first_step finished"


@pytest.fixture(scope="module")
def runs(musubi, tmp_path_factory):
    """Three epochs with everything that the patches change: without them, and with all of them. [(folder, result)]"""
    work = tiny.workdir()
    base = tmp_path_factory.mktemp("musubi")

    def run(patched):
        folder = base / ("patched" if patched else "plain")
        config = tiny.cached(work, folder, batch_size=2)
        (folder / "sorted.py").write_text(SORTED)
        args = tiny.arguments(
            work, config, folder / "made", "--save_state", "--save_every_n_steps", "2", "--max_train_epochs", "3",
            "--sample_every_n_steps", "5", "--persistent_data_loader_workers", "--sample_prompts", str(work / "prompts.txt"),
            "--log_with", "tensorboard", "--logging_dir", str(folder / "logs"), "--save_last_n_steps", "4",
            max_data_loader_n_workers="2",
        )  # fmt: skip
        settings = {"TINY_LOSSES": str(folder / "losses"), "HANGPROOF_RUN": str(folder)}
        settings |= resume_helpers.followed(folder)
        if not patched:
            settings["TINY_FAULTS"] = f"musubi_tuner.dataset.image_video_dataset={folder / 'sorted.py'}"
        # the script in the package's folder, the one with the patches
        where = "src/musubi_tuner" if patched else ""
        command = tiny.command("zimage_train_network.py", *args, patched=patched, folder=where)
        result = helpers.watch(command, tiny.environment(work, patched, **settings), tiny.checkout(), 400)
        assert result.code == 0, result.log[-3000:]
        return folder, result

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, (False, True)))


def test_guarded_training_has_the_same_numbers_and_a_heartbeat_that_describes_it(runs):
    (plain, _), (folder, _) = runs
    phases = resume_helpers.same_training(plain, folder, 12, 2)
    assert phases[:3] == ["import", "load", "first_step"] and phases[-1] == "end"
    assert sorted(phases[3:-1]) == ["sample", "save", "step"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [loss for _, _, loss in tiny.losses(folder / "losses")]
    assert lines[0]["lr"] == 1e-3 and lines[-1]["lr"] < 1e-4  # a cosine
    assert (folder / "phases.points").read_text().split() == POINTS.split()
    (beat,) = heartbeat.read_all(folder / "hb")
    assert all(beat.reached) and beat.point == "finished" and beat.epoch == 3
    assert startup.read_about(beat.about)["device"] == "cpu"


def test_every_state_that_is_left_verifies_and_nothing_else_is_left(runs):
    folder, result = runs[1]
    made = folder / "made"
    states = checkpoint.states(made)
    assert len(states) >= 3 and all(checkpoint.problems(state, deep=True) == [] for state in states)
    assert not [path for path in made.iterdir() if path.name.startswith(".")]
    assert "not guarded" not in result.log and "is kept" not in result.log


def test_the_last_save_comes_before_the_end_of_the_trackers(runs):
    log = runs[1][1].log
    assert log.index("model saved.") > log.index("saving last state.")
    tree = ast.parse((tiny.checkout() / "src/musubi_tuner/training/trainer_base.py").read_bytes())
    last = find_function(save.rewrite(tree, LOOP), LOOP).body[-1]
    assert ast.unparse(last) == "_hangproof_end(accelerator)"


def caching(folder, *more, scripts=slice(None), env=()):
    """Run the caching commands, latents and text, or some of them; return their results."""
    config = tiny.dataset(folder, tiny.workdir() / "images")
    results = []
    for number, (script, args) in list(enumerate(tiny.caching(config, *more).items()))[scripts]:
        (folder / str(number)).mkdir()
        settings = {**resume_helpers.followed(folder / str(number)), **dict(env)}
        command = tiny.command(script, *args)
        results.append(helpers.watch(command, tiny.environment(tiny.workdir(), **settings), tiny.checkout(), 200))
    return results


LATENTS = slice(1)


def test_the_caching_commands_write_the_same_files_and_report_their_items(tmp_path):
    for result in caching(tmp_path):
        assert result.code == 0, result.log[-3000:]
    plain, patched = (
        {path.name: resume_helpers.tensors(path) for path in (folder / "cache").iterdir()}
        for folder in (tiny.workdir(), tmp_path)
    )
    assert patched == plain and len(plain) == 14
    for number, phase in enumerate(("cache_latents", "cache_text")):
        (beat,) = heartbeat.read_all(tmp_path / str(number) / "hb")
        assert beat.outcome == "done"
        assert resume_helpers.phases(tmp_path / str(number))[:3] == ["import", "load", phase]


def test_damaged_caches_are_made_again_although_existing_ones_are_skipped(tmp_path):
    shutil.copytree(tiny.workdir() / "cache", tmp_path / "cache")
    (tmp_path / "cache/.000_0064x0064_zi.safetensors.99999.tmp").write_bytes(b"half")
    latents, text = (tmp_path / "cache" / name for name in ("000_0064x0064_zi.safetensors", "001_zi_te.safetensors"))
    before = {
        path: (resume_helpers.tensors(path), path.stat().st_mtime_ns) for path in (tmp_path / "cache").glob("00*")
    }
    latents.write_bytes(latents.read_bytes()[:-1000])
    text.write_bytes(text.read_bytes()[:-2] + b"\xff\x7f")  # NaN, in bfloat16 and in float32
    results = caching(tmp_path, "--skip_existing")
    for result, path in zip(results, (latents, text), strict=True):
        assert result.code == 0, result.log[-3000:]
        assert f"{path} is damaged (" in result.log and result.log.count("is damaged") == 1
    assert all(resume_helpers.tensors(path) == tensors for path, (tensors, _) in before.items())
    assert {path for path, (_, written) in before.items() if path.stat().st_mtime_ns != written} == {latents, text}
    assert not (tmp_path / "cache/.000_0064x0064_zi.safetensors.99999.tmp").exists()


def test_nan_is_refused_and_not_replaced_by_zero(tmp_path):
    (tmp_path / "nan.py").write_text(
        "import torch\nencode = module.load_autoencoder_kl\n"
        "def load(*args, **kwargs):\n    vae = encode(*args, **kwargs)\n    original = vae.encode\n"
        "    def broken(pixels):\n        result = original(pixels)\n        result.mode()[:] = float('nan')\n"
        "        return result\n    vae.encode = broken\n    return vae\nmodule.load_autoencoder_kl = load\n"
    )
    fault = {"TINY_FAULTS": f"musubi_tuner.zimage.zimage_autoencoder={tmp_path / 'nan.py'}"}
    (done,) = caching(tmp_path, scripts=LATENTS, env=fault)
    assert done.code == 1 and "no cache is written, because latents_1x" in done.log, done.log[-3000:]
    assert not list((tmp_path / "cache").glob("*x*_zi.safetensors"))


def test_a_caching_command_stops_on_request(tmp_path):
    (tmp_path / "stop.py").write_text(
        "from guards import heartbeat\noriginal = module.save_latent_cache_z_image\n"
        "def save(*args, **kwargs):\n    original(*args, **kwargs)\n"
        f"    heartbeat.set_request({str(heartbeat.path_of(tmp_path / '0/hb', 0))!r}, heartbeat.REQUEST_STOP)\n"
        "module.save_latent_cache_z_image = save\n"
    )
    fault = {"TINY_FAULTS": f"musubi_tuner.dataset.image_video_dataset={tmp_path / 'stop.py'}"}
    (done,) = caching(tmp_path, scripts=LATENTS, env=fault)
    assert "--skip_existing continues from there" in done.log, done.log[-3000:]
    (beat,) = heartbeat.read_all(tmp_path / "0/hb")
    assert beat.outcome == "stopped" and len(list((tmp_path / "cache").glob("*x*_zi.safetensors"))) < 7
