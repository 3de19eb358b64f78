"""The findings of "Check images" as the page shows them."""

from draft_helpers import drop, found, photo

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
