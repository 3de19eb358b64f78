"""The ladder: which rung fails on real training of the tiny model, and what that says; a broken image is named."""

import pytest
from short_run_helpers import launched, tiny_run

from launch import ladder
from launch.ladder import FAILS, SLOW, TRAINS, Climb, Rung, compare, rungs
from launch.short_run import Result


@pytest.mark.parametrize(
    ("images", "sizes"),
    [(1, [1]), (2, [2]), (3, [2, 3]), (100, [2, 100]), (101, [2, 100, 101]), (10_000, [2, 100, 10_000])],
)
def test_the_rungs_are_2_100_and_all(images, sizes):
    assert [rung.images for rung in rungs(images)] == sizes
    assert rungs(images)[-1].name in (f"all {images:,} images", f"{images} images", f"{images} image")


def rung(number: int, outcome: str = TRAINS, **measured) -> Rung:
    made = next(one for one in rungs(1000) if one.images == number)
    for name, value in {"outcome": outcome, "step_s": 1.0, "host_bytes": 4 * 10**9, **measured}.items():
        setattr(made, name, value)
    return made


def test_what_grows_with_the_images_is_a_problem_of_scale():
    fine = [rung(2), rung(100), rung(1000)]
    assert (compare(fine).kind, compare(fine).text) == (
        "fine",
        "Nothing is wrong: 2 images, 100 images, all 1,000 images train.",
    )
    grown = compare([rung(2), rung(100), rung(1000, host_bytes=20 * 10**9)])
    assert grown.kind == "scale" and "4.0 GB with 2 images, 20.0 GB with all 1,000 images" in grown.text
    slower = compare([rung(2), rung(100), rung(1000, step_s=3.0)])
    assert slower.kind == "scale" and "A step takes longer with more images: 1 s" in slower.text
    encoding = compare([rung(2, image_s=0.5), rung(1000, image_s=4.0)])
    assert encoding.kind == "scale" and "Encoding an image takes longer" in encoding.text
    late = compare([rung(2), rung(100, SLOW, text="It was still working.")])
    assert late.kind == "slow" and "--limit" in late.advice
    assert compare([rung(2, SLOW, text="It was still working.")]).kind == "slow"


@pytest.mark.parametrize("bad", [0, 1, 7, 49, 98, 99])
def test_halving_finds_the_image_wherever_it_is(bad, tmp_path, monkeypatch):
    images = [tmp_path / f"{number}.png" for number in range(100)]
    tried = []

    def train(self, some, limit_s, meter=None):
        tried.append(len(some))
        return Result(FAILS if images[bad] in some else TRAINS, "It failed.")

    monkeypatch.setattr(Climb, "_train", train)
    monkeypatch.setattr(Climb, "_read_images", lambda self: None)
    climb = Climb(None, tmp_path, images, 1e12, 1e6, (), lambda line: None)
    monkeypatch.setattr(ladder.short_run, "what_to_change", lambda spec, found: "")
    found = climb.climb()
    assert (found.kind, found.image) == ("image", f"{bad}.png") and len(tried) <= 12, (found, tried)


def test_a_number_of_images_that_fails_without_a_bad_one_is_a_problem_of_scale(tmp_path, monkeypatch):
    images = [tmp_path / f"{number}.png" for number in range(100)]
    monkeypatch.setattr(
        Climb,
        "_train",
        lambda self, some, limit_s, meter=None: Result(FAILS if len(some) > 60 else TRAINS, "No memory."),
    )
    monkeypatch.setattr(Climb, "_read_images", lambda self: None)
    monkeypatch.setattr(ladder.short_run, "what_to_change", lambda spec, found: "")
    found = Climb(None, tmp_path, images, 1e12, 1e6, (), lambda line: None).climb()
    assert found.kind == "scale" and "no single image is to blame" in found.text and "No memory." in found.text


@pytest.mark.slow
def test_a_broken_image_is_named(data, one_cpu):
    folder = tiny_run(data, images=5)
    broken = sorted((data / "datasets" / folder.name).glob("*.png"))[3]
    broken.write_bytes(broken.read_bytes()[:80])
    code, found, said = launched("ladder", folder)
    assert code == 1 and (found["kind"], found["image"]) == ("image", broken.name), said
    assert found["rungs"][0]["outcome"] == TRAINS and "export it again" in found["advice"]
