""" "Check images" on a draft: each finding is fixed by one step, and undo takes the fix back."""

from types import SimpleNamespace

import pytest
from draft_helpers import drawn, drop, found, item_of, photo, shot, texts
from PIL import ImageFilter

import runs
from ui.dataset import checks, doctor, draft, draft_store
from ui.dataset.images import images_view


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
    shot("rocket.jpg").resize((1600, 300)).save(folder / "wide.png")
    shot("chelsea.png").resize((902, 600)).convert("CMYK").save(folder / "cmyk.jpg")
    shot("hubble_deep_field.jpg").crop((0, 0, 400, 220)).save(folder / "little.png")
    return folder


@pytest.fixture
def full(mine, pictures):
    """A draft with these pictures."""
    assert drop(mine, *sorted(pictures.iterdir())) == (8, [])
    draft.save_fields(mine, {"trigger": "ohwx", "batch_size": 2, "repeats": 1})
    return mine


def test_each_finding_is_fixed_by_one_step_that_undo_takes_back(full):
    kinds = found(full)
    expected = {"duplicate": "copy.png", "near": "near.jpg", "small": "little.png", "blurred": "blurred.png"}
    expected |= {"dark": "dark.png", "cropped": "wide.png", "changed": "cmyk.jpg"}
    assert {kind: kinds.get(kind) for kind in expected} == {kind: [name] for kind, name in expected.items()}
    assert kinds["no_caption"] and "wide.png" in kinds["lonely"]
    for kind in kinds:
        if not checks.KINDS[kind].fix:
            with pytest.raises(runs.RunError, match="nothing left"):
                doctor.fix(full, kind)
            continue
        before = draft_store.read(full)["images"]
        message = doctor.fix(full, kind)
        after = found(full)
        assert kind not in after, (kind, message, after.get(kind))
        assert message.endswith(".") and message[0].isupper()
        assert draft.undo(full)
        assert draft_store.read(full)["images"] == before, f"undo of {kind}"
        assert set(found(full)) == set(kinds)


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
    draft.save_fields(mine, {"resolution": 512, "batch_size": 1})
    assert found(mine)["cropped"] == ["wide.png"] and found(mine)["small"] == ["tiny.png"]
    cropped = doctor._pictures(mine, "cropped", 0, 9)
    assert "left:25.00%;top:0.00%;width:50.00%;height:100.00%" in cropped and 'aria-label="Crop: wide.png"' in cropped
    assert "hp-part" not in doctor._pictures(mine, "small", 0, 9)
    buckets = [doctor._pictures(mine, doctor.BUCKETS, number, 9) for number in range(2)]
    both = {"hp-part" in one: one for one in buckets}
    assert "wide.png" in both[True] and "50% kept" in both[True] and "<button" not in both[True]
    assert "tiny.png" in both[False] and "all of it is trained" in both[False]
    assert "Show more (1)" in doctor._pictures(mine, "no_caption", 0, 1)


def test_the_findings_and_their_fixes(mine, tmp_path, monkeypatch):
    """tests/browser presses them."""
    run, _ = drawn(doctor.draw, mine, images_view())
    (state, _, kinds, *_) = run["current"](None, None, 24, "")
    assert not kinds["visible"]
    drop(mine, photo(tmp_path / "a.png", 1, size=(600, 600)), photo(tmp_path / "b.png", 2, size=(600, 300)))
    draft.save_fields(mine, {"resolution": 512, "batch_size": 2, "repeats": 96, "trigger": "ohwx"})
    state, _, kinds, bucket, *_ = run["current"]("gone", 7, 24, "")
    assert "Found in 2 images." in state["value"] and kinds["value"] == kinds["choices"][0][1]
    assert kinds["choices"][-1][0].startswith("Buckets: 2 at 512 pixels") and not bucket["visible"]
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "MOST_BUCKETS", 1)
        assert run["current"](doctor.BUCKETS, 1, 24, "")[2]["choices"][-1] == kinds["choices"][-1], "all are counted"
    shown = run["current"]("no_caption", None, 24, "Removed 1 image.")
    assert "Removed 1 image. Found in" in shown[0]["value"] and shown[7]["value"].count("<figure") == 2
    shown = run["current"](doctor.BUCKETS, 1, 24, "")
    assert shown[3]["value"] == 1 and [name for name, _ in shown[3]["choices"]] == [
        "512 × 512: 1 image, 96 an epoch", "704 × 320: 1 image, 96 an epoch"]  # fmt: skip
    press = SimpleNamespace(do="fix", id=draft.items(mine)[0].id)
    assert run["on_act"](press, "no_caption", 24) == (24, "Trigger word of 1 image.") and texts(mine) == ["ohwx", ""]
    assert run["on_act"](SimpleNamespace(do="more"), "no_caption", 24) == (48, "")
    assert "nothing left to fix" in run["on_act"](press, "no_caption", 24)[1]
    draft.save_fields(mine, {"resolution": 7})
    answer = doctor.report(mine)
    assert answer["buckets"] == [] and "Resolution" in answer["plan_error"], "in place of the buckets"
