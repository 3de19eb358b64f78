"""Drafts and uploads that nobody opens any more are deleted."""

import os
import time

from draft_helpers import photo, upload

from ui.dataset import draft, drafts
from ui.new import new_lora


def test_drafts_that_no_page_opened_for_sixty_days_are_deleted(data):
    now, day = time.time(), 24 * 3600

    def aged(mine, days):
        for path in draft.folder(mine).glob("draft.sqlite*"):
            os.utime(path, (now - days * day,) * 2)

    ages = {days: draft.new_id() for days in (0, 59, 61)}
    for days, mine in ages.items():
        draft.save_fields(mine, {"name": f"{days}"})
        aged(mine, days)
    other = draft.folder(ages[0]).parent / "not-a-draft"
    other.mkdir()
    os.utime(other, (0, 0))
    drafts.delete_expired()
    assert [draft.folder(mine).exists() for mine in ages.values()] == [True, True, False] and other.exists()
    drafts.touch(ages[59])  # a page has opened it, which restarts its expiry
    aged(ages[0], 61)
    assert new_lora.load(ages[0])[0] == ages[0]  # opening the page does the same
    drafts.delete_expired()
    assert draft.form(ages[59]) == {"name": "59"} and draft.form(ages[0]) == {"name": "0"}
    assert new_lora.load(ages[61])[0] == ages[61]  # a deleted draft opens empty, without an error


def test_an_upload_is_deleted_by_its_age_only(data, mine, tmp_path):
    old, new, again = (upload(photo(tmp_path / f"{n}.png", n)) for n in range(3))
    for path in (old, old.parent, again.parent):  # `again` was written a second time, which its folder does not show
        os.utime(path, (time.time() - 2 * drafts.UPLOAD_EXPIRES_S,) * 2)
    drafts.delete_expired()
    assert [path.exists() for path in (old, new, again)] == [False, True, True]
