"""The samples of a run in a real browser: by prompt and step, two compared, and a vote that names the best LoRA."""

import shutil

from ui_helpers import lora_file, photos, write_run
from ui_page import assert_accessible, until

from ui.run import blind_vote

HOSTILE = "a <b>dog</b><img src=x onerror=alert(1)>"


def test_samples_are_shown_compared_and_voted_on(tab, server):
    folder = write_run(server.data, "my cat", state="completed", step=24, planned_steps=24)
    (folder / "sample").mkdir()
    (folder / "sample_prompts.txt").write_text(f"a cat\n{HOSTILE}\n")

    def draw(step: int) -> None:
        for prompt, picture in enumerate(("coffee.png", "rocket.jpg")):
            name = f"{folder.name}_{step:06}_{prompt:02}_20260101120000_42.png"
            shutil.copy(photos(picture)[0], folder / "sample" / name)
        lora_file(folder / f"{folder.name}-step{step:08}.safetensors", step)

    tab.goto(f"{server.url}?run={folder.name}")
    tab.locator(f".hp-here[data-run='{folder.name}']").wait_for()
    tab.locator("#samples-fold button.label-wrap").first.click()
    tab.get_by_text("This run has no samples yet.").wait_for()
    draw(8)  # what the part offers follows the first samples
    draw(16)
    pictures = tab.locator("#samples-gallery img")
    captions = "(all) => all.map((one) => one.alt)"
    expected = ["Step 8 · a cat", f"Step 8 · {HOSTILE}", "Step 16 · a cat", f"Step 16 · {HOSTILE}"]
    until(lambda: pictures.evaluate_all(captions) == expected, "the samples")
    draw(24)  # they appear without a click
    until(lambda: pictures.count() == 6, "the new samples")
    tab.locator("#samples-prompt input").click()
    tab.get_by_role("option", name="a cat", exact=True).click()
    until(lambda: pictures.evaluate_all(captions) == [f"Step {n} · a cat" for n in (8, 16, 24)], "one prompt")
    until(lambda: pictures.first.evaluate("(image) => image.naturalWidth > 0"), "the picture")

    tab.get_by_role("tab", name="Compare two").click()
    sides = tab.locator("#samples-slider img")
    until(lambda: sides.count() >= 2, "both pictures")
    tab.locator("#samples-Left input").click()
    tab.get_by_role("option", name="Step 16 · a cat").click()
    shown_now = "(all) => all.some((one) => one.src.includes('_000016_00_'))"
    until(lambda: sides.evaluate_all(shown_now), "the other picture")

    for _ in range(blind_vote.ENOUGH - 1):  # in another browser
        blind_vote.vote(folder, blind_vote.Pair(0, 24, 8), "left")
    tab.get_by_role("tab", name="Vote").click()
    lora = tab.get_by_test_id("lora").filter(has_text="picked")
    shown = tab.locator("#vote-pair img")
    until(lambda: shown.count() == 2, "the pair")
    steps = [one.get_attribute("src").split("_0000")[1][:2] for one in shown.all()]
    side = "left" if steps[0] > steps[1] else "right"
    tab.locator(f"#vote-for-{side}").click()
    until(lambda: f"Votes: {blind_vote.ENOUGH}." in tab.locator("#vote-result").text_content(), "the next pair")
    pair, choice = blind_vote.votes(folder)[-1]
    assert choice == side and [f"{pair.left:02}", f"{pair.right:02}"] == steps
    lora.filter(has_text="Step 24").wait_for()
    assert_accessible(tab, "#samples-fold")
    tab.locator("#samples-best input").click()
    tab.get_by_role("option", name="Step 16", exact=True).click()
    lora.filter(has_text="Step 16").wait_for()
    until(lambda: lora.count() == 1, "one LoRA is picked")
    assert blind_vote.picked(folder) == 16
