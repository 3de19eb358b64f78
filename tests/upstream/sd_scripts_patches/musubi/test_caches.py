"""Cache files of the real musubi-tuner: its caching commands under the patches, and damaged files."""

import musubi_helpers
import patches_helpers as helpers
import pytest
import resume_helpers
import tiny_musubi as tiny

from guards import heartbeat

pytestmark = pytest.mark.usefixtures("musubi")


def caching(folder, *more):
    """Run the caching commands, latents and text; return their results."""
    config = tiny.dataset(folder, tiny.workdir() / "images")
    results = []
    for number, (script, args) in enumerate(tiny.caching(config, *more).items()):
        (folder / str(number)).mkdir()
        env = tiny.environment(tiny.workdir(), **resume_helpers.followed(folder / str(number)))
        results.append(helpers.watch(tiny.command(script, *args), env, tiny.checkout(), 200, 0))
    return results


def test_the_caching_commands_write_the_same_files_and_report_their_items(tmp_path):
    caching(tmp_path)
    files = lambda at: {path.name: resume_helpers.tensors(path) for path in (at / "cache").iterdir()}  # noqa: E731
    plain, patched = files(tiny.workdir()), files(tmp_path)
    assert patched == plain and len(plain) == 14
    for number, phase in enumerate(("cache_latents", "cache_text")):
        (beat,) = heartbeat.read_all(tmp_path / str(number) / "hb")
        assert beat.outcome == "done"
        assert resume_helpers.phases(tmp_path / str(number))[:3] == ["import", "load", phase]


def test_damaged_caches_are_named_and_made_again_although_existing_ones_are_skipped(tmp_path):
    """A training run meets one, and the next one is refused. Two more are damaged; the caching commands make all three
    again, and a third run trains."""
    tiny.cached(tiny.workdir(), tmp_path)
    cache = tmp_path / "cache"
    met = sorted(cache.glob("*_zi.safetensors"))[2]
    latents, text = cache / "000_0064x0064_zi.safetensors", cache / "001_zi_te.safetensors"
    left = cache / ".000_0064x0064_zi.safetensors.99999.tmp"
    before = {path: (resume_helpers.tensors(path), path.stat().st_mtime_ns) for path in cache.glob("00*")}
    met.write_bytes(met.read_bytes()[:-4] + b"\x00\x00\xc0\x7f")  # NaN, in float32

    def train(code):
        return musubi_helpers.train(tmp_path, "--max_train_epochs", "2", code=code)

    first, second = train(1), train(1)
    assert f"{met} is damaged (" in first.log
    assert f"renamed to {met.name}.corrupt; run the caching command again" in first.log
    assert "1 caches were damaged and have not been made again" in second.log, second.log[-3000:]
    assert str(met) in second.log
    left.write_bytes(b"half")
    latents.write_bytes(latents.read_bytes()[:-1000])
    text.write_bytes(text.read_bytes()[:-2] + b"\xff\x7f")  # NaN, in bfloat16 and in float32
    results = caching(tmp_path, "--skip_existing")
    for result, path in zip(results, (latents, text), strict=True):
        assert f"{path} is damaged (" in result.log and result.log.count("is damaged") == 1
    train(0)
    assert all(resume_helpers.tensors(path) == tensors for path, (tensors, _) in before.items())
    assert {path for path, (_, at) in before.items() if path.stat().st_mtime_ns != at} == {latents, text, met}
    assert not left.exists()
