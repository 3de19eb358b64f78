"""A draft of the API."""

import pytest
from draft_helpers import add_photos

from runs.files import RunError
from ui.api import server
from ui.dataset import images
from ui.new import form

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_a_draft_of_the_api_follows_its_model_and_images_as_on_the_page(data, mine, tmp_path):
    from ui.api import drafts

    made = drafts.new_draft()
    for one in (made, mine):
        add_photos(one, tmp_path, 4)
        form.save(one, {"model": "sd15"}, typed=one == mine)
    found = drafts.review_draft(made)
    assert (found["settings"], found["steps"]) == (form.current(mine), form.reviewed(mine).steps)
    assert 1500 <= found["steps"] <= 2500
    with pytest.raises(RunError, match="There is no setting 'rnak'; use some of name, trigger"):
        drafts.set_settings(made, {"rnak": 4})


def test_a_filter_that_does_not_exist_does_not_list_all_images(data):
    import gradio as gr

    list_images, made = server.endpoints()["list_images"], server.endpoints()["new_draft"]()
    for name in images.FILTERS:
        assert list_images(made, filter=name)["total"] == 0
    with pytest.raises(gr.Error, match="Input should be"):
        list_images(made, filter="no_captions")
