"""What "Check images" finds, and how each finding is fixed and the fix undone."""

import time
from pathlib import Path

import pytest
import skimage.data
from draft_helpers import camera_exif, drop, item, item_of, photo
from PIL import Image, ImageFilter

import runs
from runs.pictures import decoded
from ui.dataset import bucket_preview, checks, doctor, doctor_fold, draft, draft_images, draft_store


def shot(name: str) -> Image.Image:
    return Image.open(Path(skimage.data.__file__).parent / name).convert("RGB")


def found(draft_id: str) -> dict[str, list[str]]:
    """The files of each finding."""
    report = doctor.examine(draft_id, again=True)
    return {kind: [report.items[one.id].file for one in some] for kind, some in report.findings.items()}


@pytest.mark.parametrize("name", ["astronaut.png", "chelsea.png"])
def test_a_photo_is_fine_and_its_blurred_dark_and_bright_versions_are_not(tmp_path, name):
    def judged(image: Image.Image, **save) -> list[str]:
        path = tmp_path / f"x.{save.get('format', 'png').lower()}"
        image.save(path, **save)
        looks = draft_images.measured(path, path.name, tmp_path / "copy")["looks"]
        kinds = checks._pixels([item("x", *image.size, looks=looks)], {})
        return [kind for kind, some in kinds.items() if some]

    image = shot(name)
    image.thumbnail((512, 512))
    assert judged(image) == [] == judged(image, format="JPEG", quality=85)
    assert judged(image.filter(ImageFilter.GaussianBlur(4))) == ["blurred"]
    large = image.resize((image.width * 3, image.height * 3), Image.Resampling.BICUBIC)
    assert judged(large) == [], "sharp enough at the size that is compared"
    assert "dark" in judged(image.point(lambda value: value * 0.1))
    assert "bright" in judged(image.point(lambda value: 225 + value * 0.11))


def test_what_is_converted_is_what_the_data_set_converts(tmp_path):
    """Beside the rotation by EXIF data."""
    photo_ = shot("chelsea.png")
    photo_.save(tmp_path / "upright.jpg")
    photo_.save(tmp_path / "exif.jpg", exif=camera_exif(6))
    photo_.convert("CMYK").save(tmp_path / "cmyk.jpg")
    photo_.convert("RGBA").save(tmp_path / "opaque.png")
    photo_.convert("P").save(tmp_path / "palette.png")
    clear = photo_.convert("RGBA")
    clear.putalpha(100)
    clear.save(tmp_path / "alpha.png")
    photo_.convert("L").save(tmp_path / "grey.png")
    Image.new("I;16", (64, 64), 40_000).save(tmp_path / "sixteen.png")
    photo_.save(tmp_path / "moving.webp", save_all=True, append_images=[photo_.rotate(90)], lossless=True)
    for path in sorted(tmp_path.iterdir()):
        changes, why = draft_images.measured(path, path.name, tmp_path / "copy")["changes"], decoded(path)[2]
        assert bool(changes) == bool(why) or why == "rotated upright", (path.name, changes, why)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """One picture for each finding, but those of captions."""
    folder = tmp_path_factory.mktemp("pictures")
    first = shot("astronaut.png")
    first.save(folder / "a.png")
    first.save(folder / "copy.png", compress_level=1)
    first.resize((470, 470)).save(folder / "near.jpg")
    shot("coffee.png").filter(ImageFilter.GaussianBlur(5)).save(folder / "blurred.png")
    shot("motorcycle_left.png").point(lambda value: value * 0.08).save(folder / "dark.png")
    shot("coins.png").resize((768, 606)).point(lambda value: 220 + value * 0.13).save(folder / "bright.png")
    shot("rocket.jpg").resize((1600, 300)).save(folder / "wide.png")
    shot("chelsea.png").resize((902, 600)).convert("CMYK").save(folder / "cmyk.jpg")
    shot("hubble_deep_field.jpg").crop((0, 0, 400, 220)).save(folder / "little.png")
    return folder


@pytest.fixture
def full(mine, pictures):
    """A draft with these pictures."""
    assert drop(mine, *sorted(pictures.iterdir())) == (9, [])
    draft.save_fields(mine, {"trigger": "ohwx", "batch_size": 2, "repeats": 1})
    return mine


EXPECTED = {
    "duplicate": ["copy.png"],
    "near": ["near.jpg"],
    "small": ["little.png"],
    "blurred": ["blurred.png"],
    "dark": ["dark.png"],
    "bright": ["bright.png"],
    "cropped": ["wide.png"],
    "changed": ["cmyk.jpg"],
}


def test_each_finding_is_fixed_by_one_step_that_undo_takes_back(full):
    kinds = found(full)
    assert {kind: kinds.get(kind) for kind in EXPECTED} == EXPECTED
    assert kinds["no_caption"] and "wide.png" in kinds["lonely"]
    for kind in kinds:
        if not checks.KINDS[kind].fix:
            continue
        before = draft_store.read(full)["images"]
        message = doctor.fix(full, kind)
        after = found(full)
        assert kind not in after, (kind, message, after.get(kind))
        assert message.endswith(".") and message[0].isupper()
        assert draft.undo(full)
        assert draft_store.read(full)["images"] == before, f"undo of {kind}"
        assert set(found(full)) == set(kinds)


def test_one_of_several_is_fixed(full):
    kinds = found(full)
    one = item_of(full, kinds["no_caption"][0])
    doctor.fix(full, "no_caption", [one.id])
    assert found(full)["no_caption"] == kinds["no_caption"][1:]
    assert item_of(full, one.file).caption == "ohwx"
    with pytest.raises(runs.RunError, match="nothing left to fix"):
        doctor.fix(full, "no_caption", [one.id])


def test_the_best_of_several_is_kept(mine, tmp_path):
    shot("coffee.png").filter(ImageFilter.GaussianBlur(4)).save(tmp_path / "a-blurred.png")
    shot("coffee.png").resize((300, 200)).save(tmp_path / "b-small.png")
    shot("coffee.png").save(tmp_path / "c-best.png")
    drop(mine, *sorted(tmp_path.glob("*.png")))
    assert set(found(mine)["near"]) == {"a-blurred.png", "b-small.png"}
    doctor.fix(mine, "near")
    assert [one.file for one in draft.items(mine)] == ["c-best.png"]


@pytest.mark.parametrize(("damage", "said"), [("cut", "changed since you added it"), ("gone", "No such file")])
def test_a_file_that_was_damaged_since_is_found_at_the_next_check(full, damage, said):
    path = draft.original(full, item_of(full, "a.png").id)
    path.write_bytes(path.read_bytes()[:1000]) if damage == "cut" else path.unlink()
    assert found(full)["damaged"] == ["a.png"]
    assert said in doctor.examine(full).findings["damaged"][0].detail


@pytest.mark.parametrize(
    ("captions", "kinds"),
    [
        (["ohwx, a cat on a mat", "a dog", "OHWX sits"], {"no_trigger": [1]}),
        (["an ohwxen"], {"no_trigger": [0]}),
        (["", " "], {"no_caption": [0, 1]}),
        (
            ["ohwx, a cat sits on the red mat", "ohwx, the dog runs over the wide field",
             "ohwx, a bird is in the sky above", "ohwx, solo, red hair, smile, outdoors"],
            {"style": [3]},
        ),
        (["ohwx, solo, smile, hat", "ohwx, red, blue, 1girl", "ohwx, dog, cat, sky"], {}),
    ],
)  # fmt: skip
def test_captions(captions, kinds):
    empty = [() if text.strip() else ("no_caption",) for text in captions]
    items = [item(f"{n}", 600, 600, caption=text, warnings=empty[n]) for n, text in enumerate(captions)]
    got = checks.findings(items, [], "ohwx")
    assert {kind: [int(one.id) for one in some] for kind, some in got.items()} == kinds


def test_images_of_buckets_smaller_than_a_batch_go_to_the_nearest_full_one(mine, tmp_path):
    square = [photo(tmp_path / f"{number}.png", number, size=(640, 640)) for number in range(4)]
    drop(mine, *square, photo(tmp_path / "tall.png", 9, size=(640, 760)))
    draft.save_fields(mine, {"batch_size": 4, "repeats": 1, "resolution": 512})
    assert found(mine)["lonely"] == ["tall.png"]
    doctor.fix(mine, "lonely")
    assert "lonely" not in found(mine)
    plan = doctor.examine(mine).plan
    assert [(one.size, one.shown) for one in plan.buckets] == [((512, 512), 5)]
    draft.save_fields(mine, {"batch_size": 64})
    with pytest.raises(runs.RunError, match="batch size to 1"):
        doctor.fix(mine, "lonely")


def test_only_a_cropped_image_is_shown_with_the_part_that_is_kept(mine, tmp_path):
    drop(mine, photo(tmp_path / "wide.png", 1, size=(2400, 300)), photo(tmp_path / "tiny.png", 2, size=(64, 64)))
    draft.save_fields(mine, {"resolution": 512})
    assert found(mine)["cropped"] == ["wide.png"] and found(mine)["small"] == ["tiny.png"]
    assert "hp-part" in doctor_fold._pictures(mine, "cropped", 0, 9)
    assert "hp-part" not in doctor_fold._pictures(mine, "small", 0, 9)
    buckets = [doctor_fold._pictures(mine, doctor.BUCKETS, number, 9) for number in range(2)]
    shown = {"hp-part" in one: one for one in buckets}
    assert "wide.png" in shown[True] and "% kept" in shown[True]
    assert "tiny.png" in shown[False] and "all of it is trained" in shown[False]


def test_an_error_in_step_1_is_named_where_the_buckets_would_be(full):
    draft.save_fields(full, {"resolution": 7})
    answer = doctor.report(full)
    assert answer["buckets"] == [] and "Resolution" in answer["plan_error"]


def test_10_000_images_are_judged_in_a_second():
    known = {"contrast": 900, "mean": 90, "low": 10, "high": 200}
    looks = [{"pixels": f"{n // 2}", "sharpness": n % 7 / 100, **known} for n in range(10_000)]
    items = [
        item(f"{n}", 500 + n % 900, 700, caption="ohwx" if n % 3 else "", looks=one) for n, one in enumerate(looks)
    ]
    spec = runs.make({"name": "x", "batch_size": 4})
    began = time.process_time()
    plan = bucket_preview.plan(spec, items)
    got = checks.findings(items, [], "ohwx", plan)
    assert sum(map(len, got.values())) > 2_000
    assert time.process_time() - began < 5, "0.2 s on a quiet machine"
