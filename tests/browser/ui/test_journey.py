"""From images to a LoRA in a real browser: errors that lose nothing, addresses, a full disk, a bad network."""

import contextlib
import re
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
import ui_page as ui
from PIL import Image
from playwright.sync_api import TimeoutError
from safetensors import safe_open
from ui_helpers import photos, serving, small_disk, write_run


@pytest.mark.journey
def test_from_images_and_captions_to_a_lora(tab, data, tmp_path):
    with serving(data) as server:
        folder = ui.set_up_run(tab, server, "first", repeats="1", epochs="1")
        assert (data / "datasets" / "first" / "chelsea.txt").read_text() == "tok, a tabby cat\n"
        ui.state_is(tab, "completed")
        tab.locator("[data-testid=steps][data-step='4']").wait_for()
        with tab.expect_download() as download:
            tab.get_by_test_id("download").click()
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
    assert path.name == "first.safetensors" and path.read_bytes() == (folder / path.name).read_bytes()
    with safe_open(path, framework="numpy") as lora:
        assert any("lora" in key for key in lora.keys())  # noqa: SIM118


def test_the_form_waits_for_the_draft_and_each_error_is_shown_beside_what_is_wrong(tab, server, tmp_path):
    calls = re.compile("/(queue/join|component_server)")
    pointer_events = "getComputedStyle(document.querySelector('.hp-step')).pointerEvents"
    with ui.hold(tab, to=calls) as asks:
        tab.goto(server.url)
        tab.locator("#start").wait_for()
        asks()
        assert tab.evaluate(pointer_events) == "none"
    tab.locator("body.hp-open").wait_for()
    assert tab.evaluate(pointer_events) == "auto"

    # What is chosen before an answer stays.
    ui.gpu_fold(tab)
    tab.locator("#plan .hp-plan").wait_for()  # it moves what is below it
    with ui.hold(tab, to=calls) as asks:
        ui.choose_tiny(tab)
        asks()
        tab.get_by_label("kohya's sd-scripts").click()
    ui.until(lambda: tab.wait_for_timeout(50) or ui.field(tab, "resolution").input_value() == "64", "its resolution")
    tab.wait_for_timeout(300)
    assert tab.get_by_label("kohya's sd-scripts").is_checked()

    # Errors.
    ui.field(tab, "trigger").fill("tok")
    tab.locator("#start").click()
    problem = tab.locator("#problem")
    problem.get_by_text("Name: Give your LoRA a name").wait_for()
    assert "Images: Add at least one image" in problem.inner_text()
    tab.locator("#name .hp-field-error").get_by_text("Give your LoRA a name").wait_for()
    (tmp_path / "fake.png").write_text("I am text")
    Image.new("1", (30_000, 1_000)).save(tmp_path / "huge.png")
    ui.drop(tab, tmp_path / "fake.png", tmp_path / "huge.png", *photos("coffee.png"), count=1)
    problem.locator(".hp-bad").wait_for(state="hidden")  # the images have changed
    notes = tab.locator(".hp-notes")
    for text in ("fake.png: not a", "huge.png: .*too large"):
        notes.get_by_text(re.compile(text, re.IGNORECASE)).wait_for()
    ui.field(tab, "name").fill("no start")

    # A caption that cannot be saved.
    tab.get_by_label("Built-in").click()
    ui.caption(tab, "coffee.png").fill("x" * 20_001)
    tab.locator(".hp-card .hp-saved").get_by_text("not saved").wait_for()
    banner = tab.get_by_test_id("unsaved-banner")
    banner.get_by_text("shorten it to 20000").wait_for()
    tab.locator("#start").click()
    problem.get_by_text("Captions or masks not saved: 1").wait_for()
    ui.caption(tab, "coffee.png").fill("a cup")
    ui.saved(tab, "coffee.png")
    banner.wait_for(state="hidden")
    assert ui.field(tab, "trigger").input_value() == "tok" and ui.captions(tab) == {"coffee.png": "a cup"}
    assert not (server.data / "outputs" / "no-start").exists()


def test_a_full_disk_during_an_upload_is_reported_and_loses_nothing(tab, tmp_path):
    with small_disk(tmp_path, "3m") as disk, serving(disk) as server:
        ui.open_page(tab, server)
        ui.drop(tab, *photos("coins.png"), count=1)
        ui.caption(tab, "coins.png").fill("old coins")
        ui.saved(tab, "coins.png")
        many = photos("astronaut.png", "motorcycle_left.png", "motorcycle_right.png", "hubble_deep_field.jpg")
        tab.get_by_test_id("image-picker").set_input_files([str(p) for p in many])
        tab.locator(".hp-notes").get_by_text("disk is full").wait_for()
        assert ui.captions(tab)["coins.png"] == "old coins"
        assert "Drop images or folders here" in tab.locator(".hp-drop").inner_text()


def test_a_tab_and_a_run_are_opened_by_their_address_and_named_in_it(tab, server):
    for name in ("address one", "address two"):
        write_run(server.data, name, state="completed")

    def is_open(selected: str, **query: str) -> None:
        """The tab that is open, and what the address says."""
        tab.locator("body.hp-open").wait_for()

        def now() -> tuple[str, dict[str, str]]:
            address = tab.evaluate("location.href")  # page.url is what Playwright knew at its last call
            found = {key: value[0] for key, value in parse_qs(urlsplit(address).query).items()}
            return tab.locator("[data-tab-id][aria-selected=true]").inner_text(), found

        ui.until(lambda: now() == (selected, query), f"{selected} and {query}")

    tab.goto(f"{server.url}/?run=address-one")
    is_open("Runs", run="address-one")
    tab.locator(".hp-here[data-run='address-one']").wait_for()
    tab.locator("#run-list [data-run='address-two']").click()
    is_open("Runs", run="address-two")
    tab.get_by_role("tab", name="New LoRA").click()
    is_open("New LoRA")  # the first tab needs no address
    tab.get_by_role("tab", name="Other machines").click()
    is_open("Other machines", tab="fleet")
    tab.reload()
    is_open("Other machines", tab="fleet")
    hostile = {"tab": "<script>", "run": "../.."}
    tab.goto(f"{server.url}/?{urlencode(hostile)}")
    is_open("New LoRA", **hostile)  # what nobody knows opens the first tab


def test_a_tab_that_a_narrow_page_has_in_its_menu_is_named_in_the_address_and_read(browser, server):
    with ui.a_tab(browser, width=390) as page:
        page.goto(f"{server.url}/?tab=fleet")
        page.locator("#fleet-stores .hp-empty, #fleet-stores section").first.wait_for()
        assert page.evaluate("location.search") == "?tab=fleet"


def test_a_page_whose_files_do_not_arrive_loads_again(browser, server):
    with ui.a_tab(browser) as page:
        refused = []

        def refuse(route):
            kind = route.request.url.rpartition(".")[2]
            if refused.count(kind) < 3:  # of several loads of the page
                refused.append(kind)
                route.abort("failed")
            else:
                route.continue_()

        page.route(re.compile(r"/assets/[^/]*\.css$|/scripts/page-[^/]*\.js$"), refuse)
        ui.open_page(page, server)
        assert sorted(refused) == ["css"] * 3 + ["js"] * 3
        page.locator("#start").click()  # it works
        page.locator(".hp-problem").first.wait_for()
        page.errors.clear()  # of the files that did not arrive


def test_buttons_work_after_the_stream_of_answers_broke(browser, server):
    with ui.a_tab(browser) as page:
        ui.open_page(page, server)
        ui.field(page, "name").fill("kept")
        ui.until(lambda: ui.nothing_is_kept(page), "the server has what was typed")
        page.route("**/queue/data*", lambda route: route.abort("connectionreset"), times=1)
        page.evaluate("window.notReloaded = true")
        with page.expect_request("**/queue/data*"):
            page.locator("#start").click()
        # The click has its answer on another stream, or, where it already waited for this one, the page loads again.
        answer = page.locator("#problem").get_by_text("Add at least one image")
        again = "!window.notReloaded && document.body?.matches('.hp-open')"
        ui.until(lambda: page.evaluate(again) or answer.is_visible(), "an answer or a new page")

        def works() -> bool:
            page.locator("#start").click()
            with contextlib.suppress(TimeoutError):  # an event that was lost with the stream loads the page again now
                answer.wait_for(timeout=5000)
            return answer.is_visible()

        ui.until(works, "the button works")
        assert ui.field(page, "name").input_value() == "kept"
        page.errors.clear()  # of the time without a connection
