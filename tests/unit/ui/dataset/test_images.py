"""Images are found by caption, tag and subset."""

import pytest
from draft_helpers import filled, item

from ui.dataset import bulk, draft, subsets
from ui.dataset.images import Query, image_action


def test_images_are_found_by_caption_tag_and_subset(mine):
    ids = filled(mine, "1girl, red hair, solo", "a girl with Red Hair", "", "solo")
    subsets.move(mine, ids[3:], "extra", 5)
    items = draft.items(mine)

    def found(**query):
        return [ids.index(item.id) for item in Query(**query).found(items)]

    assert found() == [0, 1, 2, 3] and found(kind="no_caption") == [2]
    assert found(text="RED hair") == [0, 1] and found(how="lacks", text="red") == [2, 3]
    assert found(how="tag", text=" Red  hair ") == [0] and found(how="no_tag", text="red hair") == [1, 2, 3]
    assert found(folder="5_extra") == [3] and found(folder="", text="solo") == [0] and found(kind="model") == []
    sent = {"draft": mine, "action": "ids", "between": [ids[3], ids[0]]}
    assert image_action({**sent, "query": {"text": "o"}})["ids"] == [ids[0], ids[3]]
    assert image_action({**sent, "query": {"how": "lacks", "text": "o"}, "between": None})["ids"] == ids[1:3]
    refused = image_action({**sent, "query": {"text": "solo"}, "between": [ids[1], ids[3]]})
    assert "no longer shown" in refused["error"]
    tags = [["solo", 2], ["1girl", 1], ["a girl with Red Hair", 1], ["red hair", 1]]
    assert bulk.tags(mine) == {"tags": tags, "total": 4}


@pytest.mark.parametrize("kind", ["small", "near"])
def test_images_are_found_by_what_is_wrong_with_them(kind):
    one, other = item("a", 64, 64, warnings=[kind]), item("b", 64, 64, warnings=[])
    assert Query(kind=kind).found([one, other]) == [one] == Query(kind="warned").found([other, one])
