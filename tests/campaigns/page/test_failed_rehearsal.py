"""A failed rehearsal is asked about before the start, also after the page's server was killed."""

from ui_helpers import alone, kill_runs, serving, squares
from ui_page import choose_tiny, drop, field, open_page, until


def test_a_failed_rehearsal_is_asked_about_and_survives_the_server(browser, tmp_path):
    from ui_page import a_tab

    data = tmp_path / "data"
    (data / "models").mkdir(parents=True)
    # Of the attempt that rehearses, the first step hangs.
    fault = {"INJECT": "benchmarks.injector:fire", "FAULT": "raises", "FAULT_PHASE": "first_step", "FAULT_STEP": "0"}
    broken = {f"HANGPROOF_{name}": value for name, value in fault.items()}
    try:
        with a_tab(browser) as tab:
            with serving(data, **alone(tmp_path), **broken) as server:
                open_page(tab, server)
                drop(tab, *squares(tmp_path / "photos", 3), count=3)
                choose_tiny(tab)
                field(tab, "name").fill("rehearsed")
                field(tab, "trigger").fill("ohwx")
                tab.locator("#rehearsal button.label-wrap").first.click()
                tab.locator("#rehearse").click()
                shown = tab.get_by_test_id("rehearsal-state")
                shown.get_by_text("Rehearsing for", exact=False).wait_for()
                server.stop(hard=True)
            with serving(data, port=server.port, **alone(tmp_path), **broken) as server:
                open_page(tab, server)
                tab.locator("#rehearsal button.label-wrap").first.click()
                shown.get_by_text("The rehearsal failed at “Train two steps”", exact=False).wait_for()
                tab.get_by_text("injected: the step failed", exact=False).first.wait_for()
                tab.locator("#start").click()
                tab.locator("#problem").get_by_text("Press Start again to start anyway", exact=False).wait_for()
                assert not (data / "outputs" / "rehearsed").exists()
                field(tab, "trigger").fill("other")
                shown.get_by_text("Out of date: the settings have changed since", exact=False).wait_for()
                field(tab, "trigger").fill("ohwx")
                until(lambda: "Out of date" not in shown.inner_text(), "the settings are those that were rehearsed")
                tab.locator("#start").click()
                tab.locator("[data-testid=state]").first.wait_for()
                assert (data / "outputs" / "rehearsed" / "rehearsal.json").is_file()
    finally:
        kill_runs(data)
