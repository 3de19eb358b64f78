"""The charts of a run: which points are sent, and how the browser draws them."""

from ui_helpers import metrics_line as line, write_incident, write_run
from ui_page import show_run, until


def test_the_charts_zoom_and_name_their_values_and_marks(page, server):
    folder = write_run(server.data, "a chart", state="stopped", planned_steps=2000)
    text = [line(s, 1 / s, 1, s / 40) for s in range(1, 1001)]
    text += [line(s, 2.0, 2, 60 + s / 40) for s in range(951, 1901)]
    (folder / "metrics.jsonl").write_text("".join(text))
    write_incident(folder, "0001", "# What the report says", step=1000, resumed_from=950)
    show_run(page, server, folder.name)
    page.locator("#run-charts").scroll_into_view_if_needed()
    main = page.get_by_role("img", name="Loss, step 1 to step 1,900. Last value 2. Marked: hung after step 1,000")
    main.wait_for()
    assert page.locator(".hp-chart canvas").count() == 3
    readout = page.locator(".hp-chart-readout")

    def hovered() -> bool:  # what is above the chart may still arrive, and move it
        main.hover(position={"x": main.bounding_box()["width"] * 0.45, "y": 60})
        return "Loss" in readout.inner_text() and "Learning rate 1e-4" in readout.inner_text()

    until(hovered, "the values under the pointer")
    box = main.bounding_box()
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 90, steps=4)
    page.mouse.up()
    page.get_by_role("button", name="Show everything").wait_for()
    assert "step 1 to" not in page.locator(".hp-main-chart").get_attribute("aria-label")
    page.locator(".hp-main-chart").focus()
    page.keyboard.press("Escape")
    main.wait_for()
    page.mouse.move(0, 0)  # the pointer moves the cursor too, when the page scrolls under it
    until(lambda: page.keyboard.press("ArrowLeft") or "step 1," in readout.inner_text(), "the arrow keys move it")
    chart = page.locator(".hp-main-chart")
    marked = lambda: chart.press("ArrowLeft") or "hung after step 1,000" in readout.inner_text()  # noqa: E731
    until(marked, "what is marked at a step is said there")
    with (folder / "metrics.jsonl").open("a") as file:  # a line that grows is drawn again
        file.write(line(1901, 2.0, 2, 120))
    page.locator("#run-charts").scroll_into_view_if_needed()
    page.get_by_role("img", name="Loss, step 1 to step 1,901").wait_for()
    with (folder / "metrics.jsonl").open("a") as file:  # a line that comes later is where a new page shows it
        file.write("".join(f'{{"kind": "validation", "step": {step}, "val_loss": 1}}\n' for step in (900, 1900)))
    titles = page.locator("#run-charts figcaption")
    until(lambda: titles.count() == 4, "the validation loss")
    assert titles.all_inner_texts()[:3] == ["Loss", "Validation loss", "Learning rate"]
