"""Runs on other machines: what a store holds is shown, however hostile it is; a stop goes through the store."""

import socket

from launch_helpers import put_run, run_with_store
from machines import Machine, Toy
from ui_helpers import serving
from ui_page import RUN_S, a_tab, assert_accessible, press

SLOW = Toy(20_000, 20, step_s=0.05)  # longer than any test
MARKUP = '<img src=x onerror="document.title=1"><script>document.title=2</script>'


def test_a_store_is_shown_as_text_for_everyone_and_its_real_run_is_stopped_from_here(browser, tmp_path):
    """Two data roots and a store between them: a real run with its monitor and agent there, the page here."""
    store = tmp_path / "store"
    far = Machine(SLOW, tmp_path / "far", limits={"bandwidth_bytes": 0})
    SLOW.create(far.data, {"store": str(store)})
    put_run(store, name=MARKUP, message=MARKUP, reason=MARKUP)
    put_run(store, "ended", state="failed", updated_at="2026-01-01T00:00:00Z")
    try:
        far.run()
        with serving(tmp_path / "data") as server, a_tab(browser, color_scheme="dark") as page:
            page.goto(f"{server.url}/?tab=fleet")
            page.get_by_text("No store is known").wait_for()
            run_with_store(server.data, "toy", str(store))
            page.get_by_role("button", name="Refresh").click()

            cat = page.locator(".hp-far[data-run=far-cat]")
            cat.wait_for()
            shown = cat.inner_text()
            assert MARKUP[:60] in shown and "40 of 100" in shown and "0.25" in shown and page.title() == "Hangproof"
            assert cat.locator("img").count() == 0
            assert page.locator(".hp-far[data-run=ended]").get_by_test_id("far-stop").count() == 0
            page.set_viewport_size({"width": 390, "height": 900})
            assert_accessible(page, "#fleet")

            run = page.locator(".hp-far[data-run=toy]")
            state = run.get_by_test_id("far-state")
            state.get_by_text("Training").wait_for(timeout=RUN_S * 1000)
            run.get_by_text(socket.gethostname()).first.wait_for()
            press(run.get_by_role("button", name="Stop toy"), run.get_by_text("Stop requested"))
            assert far.wait(RUN_S) == 3, far.output()  # stopped by the user
            assert far.status()["state"] == "stopped" and far.newest_checkpoint() > 0
            page.get_by_role("button", name="Refresh").click()
            state.get_by_text("Stopped").wait_for(timeout=RUN_S * 1000)
    finally:
        far.kill()
