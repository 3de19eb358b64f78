"""Runs on other machines: what a store holds is shown, however slow, broken or hostile it is; a stop goes through the store."""

import socket

from fleet_helpers import picture, put_run, put_sample
from ui_helpers import serving
from ui_page import a_tab, assert_accessible, faint_texts, nameless_controls, open_page, until

from benchmarks.machines import Machine, toy

SLOW = toy(2000, 20, step_s=0.05)


def open_fleet(page, server):
    open_page(page, server)
    page.get_by_role("tab", name="Other machines").click()
    page.get_by_test_id("store-address").wait_for()


def test_hostile_runs_are_shown_as_text_for_everyone(browser, tmp_path):
    store = tmp_path / "store"
    markup = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    put_run(store, name=markup, message=markup, reason=markup)
    put_run(store, "ended", state="failed", updated_at="2026-01-01T00:00:00Z")
    put_sample(store, picture())
    with serving(tmp_path / "data") as server, a_tab(browser, color_scheme="dark") as page:
        open_fleet(page, server)
        page.get_by_text("No store is known").wait_for()
        page.get_by_test_id("store-address").fill("s3://me:password@bucket")
        page.keyboard.press("Enter")
        page.get_by_text("holds no password").wait_for()
        page.get_by_test_id("store-address").fill(str(store))
        page.get_by_role("button", name="Add store").click()
        card = page.locator(".hp-far[data-run=far-cat]")
        card.wait_for()
        assert markup[:60] in card.inner_text() and page.title() == "Hangproof"
        assert card.locator("img").count() == 1 and card.locator("img").get_attribute("src").startswith(
            "data:image/jpeg"
        )
        until(lambda: card.locator("img").evaluate("one => one.naturalWidth") > 0, "the sample is decoded")
        assert "40 of 100" in card.inner_text() and "0.25" in card.inner_text()
        assert page.locator(".hp-far[data-run=ended]").get_by_test_id("far-stop").count() == 0
        assert faint_texts(page) == [] and nameless_controls(page) == []
        page.set_viewport_size({"width": 390, "height": 900})
        assert_accessible(page, "#fleet")
        page.get_by_role("button", name="Remove").click()
        page.get_by_text("No store is known").wait_for()


def test_a_run_on_another_machine_is_watched_and_stopped_from_here(browser, tmp_path):
    """Two data roots and a store between them: a real run with its monitor and agent there, the page here."""
    store = str(tmp_path / "store")
    far = Machine(SLOW, tmp_path / "far", limits={"bandwidth_bytes": 0})
    SLOW.create(far.data, {"store": store})
    try:
        far.run()
        with serving(tmp_path / "data") as server, a_tab(browser) as page:
            open_fleet(page, server)
            page.get_by_test_id("store-address").fill(store)
            page.get_by_role("button", name="Add store").click()
            card = page.locator(".hp-far[data-run=toy]")
            card.wait_for()
            until(
                lambda: card.get_by_test_id("far-state").inner_text() == "Training", "it trains, as seen from here", 200
            )
            assert socket.gethostname() in card.inner_text()
            card.get_by_role("button", name="Stop toy").click()
            card.get_by_text("Stop requested").wait_for()
            assert far.wait(120) == 3, far.output()  # stopped by the user
            assert far.status()["state"] == "stopped" and far.newest_checkpoint() > 0
            page.get_by_role("button", name="Refresh").click()
            until(lambda: card.get_by_test_id("far-state").inner_text() == "Stopped", "its end is seen from here", 200)
    finally:
        far.kill()
