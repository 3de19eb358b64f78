"""The tiny FLUX: made once, always the same."""

from concurrent.futures import ThreadPoolExecutor

from trainer_helpers import sha

from trainer import tiny_flux


def test_two_makers_at_once_make_one_model_and_always_the_same(tmp_path, monkeypatch, model):
    made, real = [], tiny_flux.make
    monkeypatch.setattr(tiny_flux, "make", lambda folder: (made.append(folder), real(folder)))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(tiny_flux.ensure, [tmp_path / "tiny-flux"] * 2))
    assert len(made) == 1
    files = [p.relative_to(tmp_path / "tiny-flux") for p in (tmp_path / "tiny-flux").rglob("*") if p.is_file()]
    assert len(files) > 5  # other tests keep a quantized copy in the model that they share
    assert [sha(tmp_path / "tiny-flux" / p) for p in files] == [sha(model / p) for p in files]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tiny-flux.lock", "tiny-flux"]
