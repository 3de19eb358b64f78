"""The part "Samples" of a run: its pictures by prompt and step, two over each other, and a blind vote on its LoRAs.

Gradio's own components show the pictures. Their addresses are those of the page's own route (ui/served.py), which sends
nothing outside the data folders; a picture that it would not send is left out.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr

from monitor.phrases import count
from runs.files import RunError
from ui import served
from ui.html import esc, number, table
from ui.run import blind_vote, fold, view
from ui.run.fold import QUIET
from ui.run.readers import kept
from ui.run.snapshots import Evolution, best

TICK_S = 5.0
MOST = 200  # pictures in the gallery
ALL = -1  # of all prompts
NO_MARK = 0  # among the steps
COLUMNS, WIDEST = 4, 6  # of the gallery
PLAIN: dict[str, Any] = {"interactive": False, "buttons": ["fullscreen"]}
GALLERY: dict[str, Any] = {"label": "Samples", "show_label": False, "height": "auto", **PLAIN}
NO_SAMPLES = "This run has no samples yet. They are drawn where “Sample prompts” has a prompt and “Generate samples every N steps” is not 0."
NO_VOTE = (
    "A blind vote needs two LoRAs with samples of the same step. Set “Save a checkpoint every N steps” and “Generate "
    "samples every N steps” to the same number."
)
Picture = tuple[str, str]  # path, caption


def prompts(found: Evolution) -> dict[int, str]:
    """The prompts that have samples, by number."""
    texts = {one.number: one.text for one in found.prompts}
    numbers = sorted({sample.prompt for one in found.snapshots for sample in one.samples})
    return {one: texts.get(one) or f"Prompt {one + 1}" for one in numbers}


def pictures(found: Evolution, prompt: int = ALL) -> list[Picture]:
    """The pictures of a prompt, or of all, by their steps; those whose names say no step are at the end."""
    texts = prompts(found)
    shown = []
    for snapshot in found.snapshots:
        for sample in snapshot.samples:
            if prompt in (ALL, sample.prompt):
                shown.append((sample.path, f"{snapshot.at[:1].upper()}{snapshot.at[1:]} · {texts[sample.prompt]}"))
    shown += [(one.path, one.path.name) for one in found.others if prompt == ALL]
    return [(path, caption) for one, caption in shown if (path := sent(one))]


def sent(path: Path) -> str | None:
    """The path as the page sends it; None for what it does not send."""

    def made() -> str | None:
        found = served.find(str(path.absolute()))
        return str(found[0]) if found and found[1].startswith("image/") else None

    return kept("sent", path, [path], made)


def summary(found: Evolution, folder: Path) -> str:
    """What is known of the run, in sentences: that it has no samples, the lowest validation loss, the picked LoRA."""
    lines = [] if found.others or prompts(found) else [NO_SAMPLES]
    if (lowest := best(found.validation)) is not None:
        lines.append(f"Lowest validation loss: {number(lowest[1], 3)} at step {lowest[0]:,}.")
    if (picked := blind_vote.picked(folder)) is not None:
        lines.append(f"Picked: the LoRA of step {picked:,}.")
    return "".join(f'<p class="hp-say">{esc(line)}</p>' for line in lines)


def draw(folder: Path) -> None:
    """Make the components of the part."""
    found = view.evolution(folder)
    everything, texts = pictures(found), prompts(found)
    head = gr.HTML(summary(found, folder), elem_id="samples-summary", apply_default_css=False)
    timer = gr.Timer(TICK_S)
    with gr.Tab("All", id="all", elem_id="samples-all"):
        prompt = gr.Dropdown(
            _prompts(texts),
            value=ALL,
            label="Prompt",
            info=_count(everything),
            interactive=True,
            elem_id="samples-prompt",
        )
        gallery = gr.Gallery(
            everything[-MOST:], columns=_columns(texts), elem_id="samples-gallery", object_fit="contain", **GALLERY
        )
    with gr.Tab("Compare two", id="compare", elem_id="samples-compare"):
        pair = _first_and_last(found, everything)
        with gr.Row(elem_classes="hp-fields"):
            one, two = (
                gr.Dropdown(
                    value=value,
                    label=label,
                    interactive=True,
                    **fold.of_run(folder, f"samples-{label}"),
                    **_choices(found, value),
                )
                for label, value in zip(("Left", "Right"), pair or (None, None), strict=True)
            )
        slider = gr.ImageSlider(
            pair, type="filepath", label="Left and right", **fold.of_run(folder, "samples-slider"), **PLAIN
        )
    with gr.Tab("Vote", id="vote", elem_id="samples-vote"):
        _vote(folder, head, timer)
    best = gr.Dropdown(
        _loras(found),
        value=blind_vote.marked(folder) or NO_MARK,
        label="Best LoRA",
        info="Marked as picked in the list of LoRAs",
        interactive=True,
        elem_id="samples-best",
    )
    known = gr.State(everything)

    def on_prompt(prompt: int) -> list[Any]:
        found = view.evolution(folder)
        shown, texts = pictures(found, prompt), prompts(found)
        columns = _columns(texts) if prompt == ALL else COLUMNS
        return [gr.update(value=shown[-MOST:], columns=columns), gr.update(choices=_prompts(texts), info=_count(shown))]

    def on_compare(one: str | None, two: str | None) -> Any:
        here = {path for path, _ in pictures(view.evolution(folder))}
        return (one, two) if {one, two} <= here else gr.skip()

    def on_best(step: int) -> str:
        try:
            blind_vote.mark(folder, None if step == NO_MARK else step)
        except RunError as error:
            return fold.note(error, True)
        return summary(view.evolution(folder), folder)

    def on_tick(known: list[Picture], prompt: int, *chosen: str | None) -> list[Any]:
        found = view.evolution(folder)
        now = pictures(found)
        if now == [tuple(each) for each in known]:
            return [gr.skip()] * 8
        # The first pictures are compared at once; what was chosen since then stays.
        pair = [{}, {}] if known else [{"value": path} for path in _first_and_last(found, now) or ()]
        sides = [gr.update(**_choices(found, *chosen), **one) for one in pair]
        between = gr.skip() if known else tuple(one["value"] for one in pair)
        heading = summary(found, folder)
        return [now, *on_prompt(prompt), *sides, between, gr.update(choices=_loras(found)), heading]

    prompt.input(on_prompt, prompt, [gallery, prompt], **QUIET)
    gr.on([one.input, two.input], on_compare, [one, two], slider, trigger_mode="always_last", **QUIET)
    best.input(on_best, best, head, **QUIET)
    outputs = [known, gallery, prompt, one, two, slider, best, head]
    timer.tick(on_tick, [known, prompt, one, two], outputs, key="samples-tick", **QUIET)


def _vote(folder: Path, head: gr.HTML, timer: gr.Timer) -> None:
    """The tab that asks which of two samples is better, and the count of the answers."""
    asked, question, sides, counted, _ = _next(folder)
    pair = gr.State(asked)
    text = gr.HTML(question, elem_id="vote-prompt", apply_default_css=False)
    shown = gr.Gallery(sides, columns=2, elem_id="vote-pair", object_fit="contain", **GALLERY)
    with gr.Row(elem_classes="hp-actions", visible=asked is not None) as choice:
        buttons = {
            side: gr.Button(side.capitalize(), elem_id=f"vote-for-{side}", min_width=90) for side in blind_vote.POINTS
        }
    result = gr.HTML(counted, elem_id="vote-result", apply_default_css=False)
    outputs = [pair, text, shown, result, choice]
    for side, button in buttons.items():

        def on_vote(pair: tuple[int, int, int], side: str = side) -> list[Any]:
            try:
                blind_vote.vote(folder, blind_vote.Pair(*pair), side)
            except RunError as error:
                return [*[gr.skip()] * 5, fold.note(error, True)]
            return [*_next(folder), summary(view.evolution(folder), folder)]

        button.click(on_vote, pair, [*outputs, head], **QUIET)
    timer.tick(lambda pair: [gr.skip()] * 5 if pair else _next(folder), pair, outputs, key="vote-tick", **QUIET)


def _next(folder: Path) -> list[Any]:
    """The next pair or None, the question, its pictures, the count of votes, and whether the buttons are shown."""
    found, votes = view.evolution(folder), blind_vote.votes(folder)
    pair = blind_vote.next_pair(found, votes)
    rows = [(f"Step {step:,}", f"{won:g}", seen) for step, won, seen in blind_vote.wins(votes)]
    left = blind_vote.ENOUGH - len(votes)
    counted = f"Votes: {len(votes)}. " + (f"After {left} more, the best one is picked." if left > 0 else "")
    result = f'<p class="hp-say">{counted}</p>' + table("Votes", ["LoRA", "Won", "Compared"], rows)
    if pair is None:
        return [None, f'<p class="hp-say">{esc(NO_VOTE)}</p>', [], result, gr.update(visible=False)]
    paths = {one.step: each.path for one in found.snapshots for each in one.samples if each.prompt == pair.prompt}
    sides = [(sent(paths[step]), caption) for step, caption in ((pair.left, "Left"), (pair.right, "Right"))]
    question = f'<p class="hp-say">Which one is better? {esc(prompts(found)[pair.prompt])}</p>'
    return [pair, question, [each for each in sides if each[0]], result, gr.update(visible=True)]


def _prompts(texts: dict[int, str]) -> list[tuple[str, int]]:
    return [("All prompts", ALL), *((text, one) for one, text in texts.items())]


def _choices(found: Evolution, *chosen: str | None) -> dict[str, Any]:
    """The pictures to compare two of. Of more than MOST, which Gradio's script would copy in each event of the page, one
    step in two, four, … and the newest; those that are chosen stay."""
    every, everything, steps = 1, pictures(found), found.snapshots
    while len(everything) > MOST * every:
        every *= 2
    some = {path for path, _ in pictures(replace(found, snapshots=(*steps[::every], *steps[-1:])))} | {*chosen}
    info = f"One in {every} steps that have samples, and the newest" if every > 1 else None
    return {"choices": [(caption, path) for path, caption in everything if path in some], "info": info}


def _loras(found: Evolution) -> list[tuple[str, int]]:
    saved = [one.step for one in found.snapshots if one.lora is not None and one.step]
    return [("The one that wins the vote", NO_MARK), *((f"Step {step:,}", step) for step in saved)]


def _count(shown: list[Picture]) -> str:
    return f"{count(len(shown), 'sample')}{f'; the newest {MOST} are shown' * (len(shown) > MOST)}"


def _columns(texts: dict[int, str]) -> int:
    """So many that a row has whole steps; COLUMNS where these do not fit."""
    return len(texts) * max(1, COLUMNS // len(texts)) if 1 <= len(texts) <= WIDEST else COLUMNS


def _first_and_last(found: Evolution, everything: list[Picture]) -> tuple[str, str] | None:
    """The first and the last picture of the first prompt; None without pictures."""
    of_one = pictures(found, min(prompts(found), default=ALL)) or everything
    return (of_one[0][0], of_one[-1][0]) if of_one else None
