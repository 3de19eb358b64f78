"""The findings of "Check images" as the page shows them."""

from types import SimpleNamespace

from draft_helpers import drawn, drop, found, photo, texts

from ui.dataset import doctor, doctor_fold, draft


def test_only_a_cropped_image_is_shown_with_the_part_that_is_kept(mine, tmp_path):
    drop(mine, photo(tmp_path / "wide.png", 1, size=(2400, 300)), photo(tmp_path / "tiny.png", 2, size=(64, 64)))
    draft.save_fields(mine, {"resolution": 512, "batch_size": 1})
    assert found(mine)["cropped"] == ["wide.png"] and found(mine)["small"] == ["tiny.png"]
    cropped = doctor_fold._pictures(mine, "cropped", 0, 9)
    assert "left:25.00%;top:0.00%;width:50.00%;height:100.00%" in cropped and 'aria-label="Crop: wide.png"' in cropped
    assert "hp-part" not in doctor_fold._pictures(mine, "small", 0, 9)
    buckets = [doctor_fold._pictures(mine, doctor.BUCKETS, number, 9) for number in range(2)]
    both = {"hp-part" in one: one for one in buckets}
    assert "wide.png" in both[True] and "50% kept" in both[True] and "<button" not in both[True]
    assert "tiny.png" in both[False] and "all of it is trained" in both[False]
    assert "Show more (1)" in doctor_fold._pictures(mine, "no_caption", 0, 1)
    assert "Show more" not in doctor_fold._pictures(mine, "no_caption", 0, 2)


def test_the_findings_and_their_fixes(mine, tmp_path):
    run, _ = drawn(doctor_fold.draw, mine)
    (state, undo, kinds, *rest) = run["current"](None, None, 24, "", None)
    assert "There are no images." in state and not kinds["visible"] and rest[-1]
    drop(mine, photo(tmp_path / "a.png", 1, size=(600, 600)), photo(tmp_path / "b.png", 2, size=(600, 300)))
    draft.save_fields(mine, {"resolution": 512, "batch_size": 2, "repeats": 96, "trigger": "ohwx"})
    state, undo, kinds, bucket, *_, seen = run["current"]("gone", 7, 24, "", None)
    assert "Found in 2 images." in state and not undo["visible"] and kinds["value"] == kinds["choices"][0][1]
    assert kinds["choices"][-1][0].startswith("Buckets: 2 at 512 pixels") and not bucket["visible"]
    assert all(one.get("__type__") == "update" and len(one) == 1 for one in run["current"]("gone", 7, 24, "", seen))
    shown = run["current"]("no_caption", None, 24, "Removed 1 image.", seen)
    assert "Removed 1 image. Found in" in shown[0] and shown[1]["visible"] and len(shown[8]) == 2
    assert shown[5]["visible"] and shown[5]["value"] and shown[6]["visible"] and shown[7].count("<figure") == 2
    shown = run["current"](doctor.BUCKETS, 1, 24, "", None)
    assert shown[3]["value"] == 1 and [name for name, _ in shown[3]["choices"]] == [
        "512 × 512: 1 image, 96 an epoch", "704 × 320: 1 image, 96 an epoch"]  # fmt: skip
    press = SimpleNamespace(do="fix", id=draft.items(mine)[0].id)
    assert run["on_act"](press, "no_caption", 24) == (24, "Trigger word of 1 image.") and texts(mine) == ["ohwx", ""]
    assert run["on_act"](SimpleNamespace(do="more"), "no_caption", 24) == (48, "")
    assert "nothing left to fix" in run["on_act"](press, "no_caption", 24)[1]
