"""The large view of an image: caption, rotation, crop, mask and weight, stored at once, and what a run gets of them."""

import base64
import io
import re

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from draft_helpers import drop, item_of, photo, run_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from runs_helpers import data  # noqa: F401
from ui_helpers import Server, browsing, photos, serving
from ui_page import PATIENCE_S, a_tab, choose_tiny, field, has_focus, open_page, state_is, until
from ui_page import drop as drop_on_page

import runs
from runs import dataset
from ui.dataset import draft, image_edit
from ui.new import form


@pytest.fixture
def mine(data) -> str:  # noqa: F811
    return draft.new_id()


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def top_ignored(width: int, height: int) -> bytes:
    """A mask that ignores the upper half."""
    mask = Image.new("L", (width, height), 255)
    mask.paste(0, (0, 0, width, height // 2))
    return png(mask)


def mask_of(draft_id: str, item: draft.Item) -> np.ndarray:
    with Image.open(draft.masks_dir(draft_id) / item.mask) as image:
        return np.asarray(image)


# The functions -------------------------------------------------------------------------------------------------------


def test_edits_are_undone_and_never_change_the_dropped_file(mine, tmp_path):
    drop(mine, photo(tmp_path / "a.png", size=(400, 300)))
    item = item_of(mine, "a.png")
    before = draft.original(mine, item.id).read_bytes()
    image_edit.crop(mine, item.id, [0.25, 0, 0.75, 1])
    assert draft.thumb(mine, item_of(mine, "a.png")).is_file()
    image_edit.weigh(mine, [item.id], 4)
    image_edit.mask(mine, item.id, top_ignored(400, 300))
    image_edit.rotate(mine, item.id, 1)
    after = item_of(mine, "a.png")
    assert (after.turn, after.crop, after.weight) == (1, (0, 0.25, 1, 0.75), 4)
    assert (after.width, after.height) == (300, 400) and after.trained_size == (300, 200)
    assert mask_of(mine, after).shape == (300, 400) and not mask_of(mine, after)[:140].any()  # as the file is
    thumb = draft.thumb(mine, after)
    with Image.open(thumb) as small:
        assert small.width > small.height
    assert len(list(thumb.parent.glob(f"{item.id}-?-*.jpg"))) == 1  # that of the edits before is gone
    labels = []
    while label := draft.undo(mine):
        labels.append(label)
    assert labels[:4] == [
        "Undone: rotation of a.png.",
        "Undone: mask of a.png.",
        "Undone: weight of a.png.",
        "Undone: crop of a.png.",
    ]
    for _ in labels:
        draft.redo(mine)
    assert item_of(mine, "a.png") == after and draft.original(mine, item.id).read_bytes() == before


def test_a_warning_counts_the_pixels_that_are_trained(mine, tmp_path):
    drop(mine, photo(tmp_path / "a.png", size=(600, 600)))
    item = item_of(mine, "a.png")
    assert "small" not in item.warnings
    image_edit.crop(mine, item.id, [0, 0, 0.3, 1])
    assert "small" in item_of(mine, "a.png").warnings
    image_edit.crop(mine, item.id, None)
    assert "small" not in item_of(mine, "a.png").warnings


def test_rotating_by_the_warning_turns_the_crop_too(mine, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    exif.get_ifd(0x8769).update({0xA002: 300, 0xA003: 400})
    drop(mine, photo(tmp_path / "a.jpg", size=(400, 300), exif=exif))
    item = item_of(mine, "a.jpg")
    assert "sideways" in item.warnings and (item.width, item.height) == (300, 400)
    image_edit.crop(mine, item.id, [0, 0, 1, 0.25])
    draft.fix(mine, item.id, "sideways")
    assert (item_of(mine, "a.jpg").turn, item_of(mine, "a.jpg").crop) == (3, (0, 0, 0.25, 1))


@pytest.mark.parametrize("turn", range(4))
def test_a_mask_is_drawn_on_the_rotated_image(mine, tmp_path, turn):
    drop(mine, photo(tmp_path / "a.png", size=(80, 60)))
    item = item_of(mine, "a.png")
    if turn:
        image_edit.rotate(mine, item.id, turn)
    shape = (80, 60) if turn % 2 == 0 else (60, 80)
    image_edit.mask(mine, item.id, top_ignored(*shape))
    shown = Image.open(io.BytesIO(image_edit.shown_mask(mine, item.id)))
    assert shown.size == shape and not np.asarray(shown)[: shape[1] // 2 - 1].any() and np.asarray(shown)[-1].all()
    image_edit.rotate(mine, item.id, 1)
    image_edit.mask(mine, item.id, top_ignored(*shape), turn=turn)  # drawn before the rotation arrived
    image_edit.rotate(mine, item.id, -1)
    again = Image.open(io.BytesIO(image_edit.shown_mask(mine, item.id)))
    assert again.tobytes() == shown.tobytes()


def test_a_white_mask_is_no_mask_and_unused_masks_are_deleted(mine, tmp_path):
    drop(mine, photo(tmp_path / "a.png", size=(64, 64)))
    item = item_of(mine, "a.png")
    image_edit.mask(mine, item.id, png(Image.new("L", (64, 64), 255)))
    assert item_of(mine, "a.png").mask is None
    for level in range(130):
        image_edit.mask(mine, item.id, png(Image.new("L", (64, 64), level)))
    files = list(draft.masks_dir(mine).iterdir())
    assert len(files) <= 106  # those of 100 undo steps
    while draft.undo(mine):
        if name := item_of(mine, "a.png").mask if draft.items(mine) else "":
            assert (draft.masks_dir(mine) / name).is_file()


def test_the_transparent_part_of_an_image_can_be_its_mask(mine, tmp_path):
    cut_out = Image.new("RGBA", (64, 48), (200, 10, 10, 255))
    cut_out.paste((0, 0, 0, 0), (0, 0, 64, 24))
    cut_out.save(tmp_path / "cut.png")
    drop(mine, tmp_path / "cut.png", photo(tmp_path / "whole.png", 1))
    cut, whole = item_of(mine, "cut.png"), item_of(mine, "whole.png")
    assert [image_edit.details(mine, item)["transparent"] for item in (cut, whole)] == [True, False]
    image_edit.rotate(mine, cut.id, 1)
    image_edit.edit(mine, {"id": cut.id, "what": "transparency"})
    mask = mask_of(mine, item_of(mine, "cut.png"))
    assert not mask[:24].any() and mask[24:].all()
    with pytest.raises(runs.RunError, match=r"whole\.png has no transparency"):
        image_edit.edit(mine, {"id": whole.id, "what": "transparency"})


def test_a_run_and_a_copy_of_it_have_the_edits(data, mine, tmp_path):  # noqa: F811
    for n in range(4):
        drop(mine, (photo(tmp_path / f"{n}.png", n, size=(128, 128)), f"10_cat/{n}.png" if n == 3 else f"{n}.png"))
    first, second, third, fourth = (item.id for item in draft.items(mine))
    draft.set_caption(mine, first, "a caption")
    image_edit.crop(mine, second, [0, 0, 0.5, 1])
    image_edit.mask(mine, third, top_ignored(128, 128))
    image_edit.weigh(mine, [first, fourth], 3)
    image_edit.mask(mine, fourth, top_ignored(128, 128))
    expected = draft.counts(mine)
    run_of(mine, repeats=5)
    folder = data / "datasets/my-lora"
    assert dataset.counts(folder) == expected == {"weight-3": 1, "": 2, "30_weight-3-cat": 1}
    assert runs.planned_steps(runs.make({"name": "x", "model": "tiny-flux", "repeats": 5, "epochs": 1}), expected) == 55
    with Image.open(folder / "1.png") as cropped:
        assert cropped.size == (64, 128)
    other = draft.new_id()
    assert draft.copy_dataset(other, "my-lora") == []
    found = {f"{item.folder}/{item.file}": item for item in draft.items(other)}
    assert {name: item.weight for name, item in found.items()} == {
        "/0.png": 3,
        "/1.png": 1,
        "/2.png": 1,
        "10_cat/3.png": 3,
    }
    assert {name for name, item in found.items() if item.mask} == {"/2.png", "10_cat/3.png"}
    assert not mask_of(other, found["/2.png"])[:60].any() and found["/0.png"].caption == "a caption"
    with Image.open(draft.original(other, found["/2.png"].id)) as image, Image.open(tmp_path / "2.png") as before:
        assert image.mode == "RGB" and image.tobytes() == before.tobytes()
    assert draft.counts(other) == expected


def test_a_run_of_a_trainer_without_masks_says_so_and_its_copy_has_them(data, mine, tmp_path):  # noqa: F811
    drop(mine, photo(tmp_path / "a.png", size=(128, 128)), photo(tmp_path / "b.png", 1, size=(128, 128)))
    image_edit.mask(mine, item_of(mine, "a.png").id, top_ignored(128, 128))
    values = {**form.defaults(), "name": "n", "model": "z-image", "backend": "musubi"}
    items, counts = draft.items(mine), draft.counts(mine)
    said = " ".join(fault.message for fault in form.review(values, counts, items=items).warnings)
    assert "1 image has a mask, and kohya's musubi-tuner cannot use masks: it is trained as a whole." in said
    values = {**values, "model": "tiny-flux", "backend": "diffusers"}
    image_edit.mask(mine, item_of(mine, "b.png").id, png(Image.new("L", (128, 128), 0)))
    said = " ".join(fault.message for fault in form.review(values, counts, items=draft.items(mine)).warnings)
    assert "The mask ignores all of b.png: erase a part of it, or remove the image" in said
    draft.undo(mine)
    assert not any("mask" in fault.message for fault in form.review(values, counts, items=items).warnings)
    note, used = image_edit.mask_note("musubi")
    assert "cannot use masks" in note and not used and image_edit.mask_note("sd-scripts")[1]
    run_of(mine, model="z-image", backend="musubi")
    other = draft.new_id()
    draft.copy_dataset(other, "my-lora")
    assert [bool(item.mask) for item in draft.items(other)] == [True, False]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
WHAT = st.sampled_from(["rotate", "crop", "weight", "mask", "transparency", "", "__class__"]) | JSON
KEYS = st.sampled_from(["turns", "crop", "weight", "png", "turn", "name"])


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(WHAT, st.dictionaries(KEYS, JSON, max_size=6), st.booleans())
def test_whatever_the_browser_sends_is_an_edit_or_an_error(mine, tmp_path, what, sent, known):
    if not draft.items(mine):
        drop(mine, photo(tmp_path / "a.png", size=(64, 48)))
    item = draft.items(mine)[0]
    try:
        image_edit.edit(mine, {"id": item.id if known else "../../etc", "what": what, **sent})
    except runs.RunError as error:
        assert str(error) and draft.items(mine)[0] == item
        return
    after = draft.items(mine)[0]
    assert known and after.weight in range(1, 11) and after.turn in range(4)
    assert after.crop is None or all(0 <= one <= 1 for one in after.crop)
    assert after.mask is None or (draft.masks_dir(mine) / after.mask).is_file()
    assert sorted(path.name for path in draft.folder(mine).parent.iterdir()) == [mine]


def test_a_mask_that_is_no_mask_is_refused_with_its_name(mine, tmp_path):
    drop(mine, photo(tmp_path / "a.png", size=(64, 48)))
    item = draft.items(mine)[0]
    for content, expected in (
        (b"<script>alert(1)</script>", "Not a readable PNG"),
        (png(Image.new("L", (48, 64))), "same shape"),
        (png(Image.new("L", (64, 48)))[:-30], "damaged"),
    ):
        sent = {"id": item.id, "what": "mask", "png": base64.b64encode(content).decode(), "name": "<b>m.png"}
        with pytest.raises(runs.RunError, match=f"<b>m.png: .*{expected}"):
            image_edit.edit(mine, sent)
    assert draft.items(mine)[0] == item


# The large view ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    with browsing() as found:
        yield found


def serious(page) -> list[str]:
    """What axe-core finds on the large view."""
    found = Axe().run(page, context=".hp-editor").response["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html']}" for one in found if one["impact"] in ("serious", "critical")]


def test_the_large_view_edits_by_keyboard_and_pointer_and_survives_a_killed_server(browser, tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("HANGPROOF_DATA", str(home))
    with serving(home) as server, a_tab(browser) as page:
        open_page(page, server)
        drop_on_page(page, *photos("coffee.png", "astronaut.png", "rocket.jpg"), count=3)
        mine = page.evaluate("hangproof.draft()")

        def now(file: str = "coffee.png") -> draft.Item:
            return item_of(mine, file)

        # opened, browsed and closed by keyboard; the focus returns to the card that was shown last
        page.get_by_label("Open astronaut.png").press("Enter")
        view = page.locator("dialog.hp-editor[open]")
        view.get_by_text("1 of 3").wait_for()
        page.keyboard.press("ArrowRight")
        view.get_by_text("2 of 3").wait_for()
        caption = view.get_by_label("Caption", exact=True)
        caption.fill("a cup, coffee, saucer")
        view.get_by_text("21 characters, about 6 tokens").wait_for()
        view.get_by_text("saved", exact=True).wait_for()
        assert now().caption == "a cup, coffee, saucer"
        assert page.locator(".hp-card[data-file='coffee.png'] textarea").input_value() == "a cup, coffee, saucer"
        caption.press("PageDown")
        view.get_by_text("3 of 3").wait_for()
        page.keyboard.press("PageDown")  # there is no next one
        page.keyboard.press("Escape")
        view.wait_for(state="detached")
        has_focus(page, "aria-label", "Open rocket.jpg")

        # crop by number fields and by pointer
        page.get_by_label("Open coffee.png").click()
        view.get_by_role("button", name="Crop", exact=True).press("Enter")
        view.get_by_label("Ratio", exact=True).select_option("1:1")
        until(lambda: now().crop is not None, "the square is stored")
        assert now().trained_size == (400, 400)
        view.get_by_label("Width", exact=True).fill("300")
        view.get_by_label("Width", exact=True).press("Enter")
        until(lambda: now().trained_size == (300, 300), "the typed size is stored")
        assert serious(page) == []
        frame = page.locator(".hp-edit-frame")
        box = frame.bounding_box()
        view.get_by_label("Ratio", exact=True).select_option("")
        view.get_by_role("button", name="Use the whole image").click()
        until(lambda: now().crop is None, "the whole image is stored")

        def drag(*points: tuple[float, float]) -> None:
            places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
            page.mouse.move(*places[0])
            page.mouse.down()
            for place in places[1:]:
                page.mouse.move(*place, steps=4)
            page.mouse.up()

        drag((0.25, 0.25), (0.75, 0.75))
        until(lambda: now().crop is not None, "the drawn crop is stored")
        assert now().crop == pytest.approx((0.25, 0.25, 0.75, 0.75), abs=0.01)
        drag((0.5, 0.5), (0.5, 0.6))  # moves it
        until(lambda: now().crop[3] > 0.8, "the moved crop is stored")
        drag((0.75, 0.85), (0.9, 0.95))  # its corner
        until(lambda: now().crop[2] > 0.85, "the resized crop is stored")
        page.locator(".hp-card[data-file='coffee.png'] .hp-tags", has_text="cropped").wait_for()

        # mask by pointer, keyboard and file
        view.get_by_role("button", name="Mask", exact=True).click()
        drag((0.3, 0.5), (0.7, 0.5))
        until(lambda: now().mask is not None, "the stroke is stored")
        painted = mask_of(mine, now())
        height, width = painted.shape
        assert painted[height // 2, width // 2] == 0 and painted[0, 0] == 255
        frame.focus()
        before = now().mask
        for _ in range(4):
            page.keyboard.press("Shift+ArrowUp")
        page.keyboard.press("Space")
        until(lambda: now().mask != before, "the dab is stored")
        assert (mask_of(mine, now()) == 0).sum() > (painted == 0).sum()
        assert serious(page) == []
        view.get_by_role("button", name="Eraser", exact=True).click()
        before = now().mask
        drag((0.3, 0.5), (0.7, 0.5))
        until(lambda: now().mask != before, "the erased stroke is stored")
        assert mask_of(mine, now())[height // 2, width // 2] == 255
        before = now().mask
        view.get_by_role("button", name="Invert", exact=True).click()
        until(lambda: now().mask != before, "the inverted mask is stored")
        assert mask_of(mine, now())[height // 2, width // 2] == 0
        wrong = tmp_path / "wrong.png"
        wrong.write_bytes(top_ignored(50, 50))
        page.get_by_test_id("mask-picker").set_input_files(str(wrong))
        view.get_by_text("wrong.png: the mask has 50 × 50 pixels and the image 600 × 400").wait_for()
        right = tmp_path / "right.png"
        right.write_bytes(top_ignored(60, 40))
        page.get_by_test_id("mask-picker").set_input_files(str(right))
        until(lambda: now().mask != before and mask_of(mine, now()).shape == (40, 60), "the file is the mask")
        view.get_by_role("button", name=re.compile("^Undo")).click()
        until(lambda: mask_of(mine, now()).shape != (40, 60), "the file is undone")
        view.get_by_role("button", name=re.compile("^Redo")).click()
        until(lambda: mask_of(mine, now()).shape == (40, 60), "the file is back")

        # rotation turns crop and mask; the weight changes the plan
        crop = now().crop
        view.get_by_role("button", name="Rotate right").click()
        until(lambda: now().turn == 1, "the rotation is stored")
        assert now().crop == pytest.approx((1 - crop[3], crop[0], 1 - crop[1], crop[2]), abs=1e-5)
        weight = view.get_by_label("Weight")
        weight.fill("3")
        weight.press("Enter")
        until(lambda: now().weight == 3, "the weight is stored")
        # The proposed repeats follow the weight, a moment later.
        until(
            lambda: (
                f"shown {5 * int(field(page, 'repeats').input_value())} times" in page.locator("#plan").inner_text()
            ),
            "the weight is in the plan",
        )

        # the server is killed; what is painted then is kept in the browser, and the restarted server gets it
        server.stop(hard=True)
        until(lambda: page.locator("img").first.count() == 1, "the page stays")
        box = frame.bounding_box()
        view.get_by_role("button", name="Brush", exact=True).click()
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.9)
        view.get_by_text("The mask is not stored yet").wait_for()
        before = now()
        assert (before.turn, before.weight, before.caption) == (1, 3, "a cup, coffee, saucer")
        again = Server(home, port=server.port)
        try:
            again.wait_for_output("Hangproof is running at")
            until(lambda: now().mask != before.mask, "the kept mask is stored", 2 * PATIENCE_S)
            after = now()
            assert (after.turn, after.crop, after.weight) == (1, before.crop, 3)
            page.set_viewport_size({"width": 390, "height": 800})
            open_page(page, again)
            page.locator(".hp-card[data-file='coffee.png'] .hp-tags", has_text="cropped · mask · ×3").wait_for()
            page.get_by_label("Open coffee.png").click()
            view.get_by_role("button", name="Mask", exact=True).click()
            until(lambda: page.evaluate(INK) > 0, "the stored mask is on the canvas")
            assert page.evaluate("document.querySelector('.hp-editor').scrollWidth") <= 390 and serious(page) == []
            view.get_by_role("button", name="Clear", exact=True).click()
            until(lambda: now().mask is None, "the mask is cleared")
            view.get_by_role("button", name="Remove image").click()
            view.get_by_text("of 2").wait_for()
            page.keyboard.press("Escape")
            assert sorted(item.file for item in draft.items(mine)) != []
        finally:
            again.stop()


# The part of the mask's canvas that is painted.
INK = """() => {
  const canvas = document.querySelector(".hp-mask-canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.filter((value, n) => n % 4 === 3 && value > 0).length;
}"""


@pytest.mark.long
def test_the_large_view_goes_through_all_pages_of_the_filtered_list(browser, tmp_path):
    with serving(tmp_path / "home") as server, a_tab(browser) as page:
        open_page(page, server)
        drop_on_page(page, *[photo(tmp_path / f"{n:02}.png", n, size=(300, 200)) for n in range(14)], count=14)
        view = page.locator("dialog.hp-editor[open]")
        page.get_by_label("Open 10.png").click()
        for key, place in (("Right", 12), ("Right", 13), ("Right", 14), ("Left", 13), ("Left", 12)):
            page.keyboard.press(f"Arrow{key}")
            view.get_by_text(f"{place} of 14").wait_for()
        page.keyboard.press("Escape")
        page.get_by_label("Show", exact=True).select_option("no_caption")
        page.get_by_label("Open 11.png").click()
        caption = view.get_by_label("Caption", exact=True)
        caption.fill("it leaves the filter now")
        view.get_by_text("saved", exact=True).wait_for()
        view.get_by_role("button", name="Rotate right").click()
        view.get_by_role("heading", name="11.png · 200 × 300").wait_for()
        caption.press("PageDown")
        view.get_by_role("heading", name="12.png").wait_for()
        view.get_by_role("button", name="Remove image").click()
        view.get_by_role("heading", name="13.png").wait_for()
        view.get_by_text("12 of 12").wait_for()


@pytest.mark.long
def test_a_run_trains_the_edited_images_and_its_copy_has_the_edits_again(browser, tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("HANGPROOF_DATA", str(home))
    with serving(home) as server, a_tab(browser) as page:
        open_page(page, server)
        drop_on_page(page, *photos("coffee.png", "astronaut.png"), count=2)
        mine = page.evaluate("hangproof.draft()")
        coffee, astronaut = (item_of(mine, file) for file in ("coffee.png", "astronaut.png"))
        image_edit.crop(mine, coffee.id, [0.25, 0, 0.75, 1])
        image_edit.mask(mine, astronaut.id, top_ignored(512, 512))
        image_edit.weigh(mine, [astronaut.id], 2)
        choose_tiny(page)
        field(page, "name").fill("masked")
        field(page, "trigger").fill("tok")
        field(page, "repeats").fill("2")
        field(page, "epochs").fill("1")
        page.locator("#plan", has_text="2 images, shown 6 times an epoch × 1 epoch = 6 steps").wait_for()
        page.locator("#start").click()
        state_is(page, "completed")
        folder = home / "datasets/masked"
        assert dataset.counts(folder) == {"": 1, "weight-2": 1} and dataset.masked(folder)
        with Image.open(folder / "coffee.png") as image:
            assert image.size == (300, 400)
        assert "alpha_mask = true" in (home / "outputs/masked/dataset.toml").read_text()
        page.locator("#copy").click()
        page.locator(".hp-card[data-file='astronaut.png'] .hp-tags", has_text="mask · ×2").wait_for()
        copied = item_of(page.evaluate("hangproof.draft()"), "astronaut.png")
        assert copied.weight == 2 and not mask_of(mine, copied)[:200].any()
        page.get_by_label("Open coffee.png").click()
        page.locator(".hp-editor h2", has_text="300 × 400").wait_for()
