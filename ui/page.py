"""The page as a whole: its two tabs and what happens between them."""

from pathlib import Path

import gradio as gr

import runs
from ui import form, new_lora, run_page

HERE = Path(__file__).parent
MARK = (
    '<svg viewBox="0 0 32 32" width="30" height="30" aria-hidden="true"><rect width="32" height="32" rx="8" fill="#0f766e"/>'
    '<path d="M6 17h5l3-8 5 15 3-7h4" fill="none" stroke="#fff" stroke-width="2.6" stroke-linecap="round" '
    'stroke-linejoin="round"/></svg>'
)
HEADER = (
    f'<header class="hp-top">{MARK}<div><h1>Hangproof</h1>'
    "<p>A LoRA run you start finishes, or stops with the reason and nothing lost.</p></div></header>"
)
ICON = "data:image/svg+xml," + MARK.replace("<svg ", "<svg xmlns='http://www.w3.org/2000/svg' ").replace(
    '"', "'"
).replace("#", "%23").replace("<", "%3C").replace(">", "%3E")
PAGE_HEAD = f'<link rel="icon" href="{ICON}"><meta name="referrer" content="no-referrer">'


def theme() -> gr.themes.Base:
    """Fonts of the system only: a page that asks a font server does not open without a network."""
    return gr.themes.Base(
        primary_hue="teal",
        secondary_hue="teal",
        neutral_hue="slate",
        radius_size="md",
        font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"],
    ).set(  # contrast: 4.5 to 1 and better, which the theme's own greys and teals are not
        body_text_color_subdued="*neutral_500",
        body_text_color_subdued_dark="*neutral_400",
        block_info_text_color="*neutral_500",
        block_label_text_color="*neutral_700",
        block_title_text_color="*neutral_800",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_800",
        body_background_fill="#f7f9fb",
        body_background_fill_dark="*neutral_950",
        background_fill_primary_dark="*neutral_900",
        block_background_fill="white",
        block_background_fill_dark="*neutral_900",
        input_background_fill="white",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
        input_background_fill_dark="*neutral_800",
        checkbox_label_background_fill="*neutral_50",
        checkbox_label_background_fill_dark="*neutral_800",
        checkbox_background_color_selected="*primary_700",
        checkbox_border_color_selected="*primary_700",
        color_accent="*primary_700",
        color_accent_soft="*primary_50",
        border_color_accent="*primary_700",
        link_text_color="*primary_700",
    )


def css() -> str:
    """The page's style sheet."""
    return (HERE / "style.css").read_text(encoding="utf-8")


def build() -> gr.Blocks:
    """The page; nothing runs until it is launched."""
    with gr.Blocks(title="Hangproof", analytics_enabled=False, delete_cache=(3600, 86400)) as page:
        draft_id = gr.BrowserState(None, storage_key="hangproof-draft", secret="hangproof")
        started = gr.State("")
        told = gr.State([])
        gr.HTML(HEADER, apply_default_css=False)
        with gr.Tabs(elem_id="tabs") as tabs:
            with gr.Tab("New LoRA", id="new") as new_tab:
                new = new_lora.build()
            with gr.Tab("Runs", id="runs") as runs_tab:
                run = run_page.build()
        _wire_new(new, draft_id)
        _wire_runs(run)
        _wire_tabs(page, new, run, tabs, new_tab, runs_tab, draft_id, started, told)
    return page


def _wire_new(new: new_lora.NewLora, draft_id) -> None:
    fields = [new.fields[key] for key in form.KEYS]
    quiet = {"show_progress": "hidden", "api_visibility": "private"}
    # One event for everything that may have changed: two would overtake one another, and what was typed first would win.
    gr.on(
        [new.loaded.change, new.images.change, *(one.change for one in fields)],
        new_lora.refresh,
        [draft_id, *fields],
        new.follows,
        trigger_mode="always_last",
        **quiet,
    )
    new.fields["model"].input(
        new_lora.choose_model,
        [new.fields["model"], new.fields["backend"]],
        [new.fields[key] for key in ("backend", *form.MODEL_FIELDS)],
        **quiet,
    )
    new.fetch.click(new_lora.fetch_model, fields, new.model, **quiet)
    new.fetching.tick(new_lora.still_fetching, fields, new.model, **quiet)
    opened = gr.State(False)
    new.flag_fold.expand(new_lora.open_flags, fields, [opened, new.flag_table], **quiet)
    gr.on(
        [new.fields[key].change for key in ("model", "tier", "backend")],
        new_lora.follow_flags,
        [opened, *fields],
        new.flag_table,
        trigger_mode="always_last",
        **quiet,
    )
    new.images.insert(
        new_lora.insert_trigger,
        [draft_id, new.images, new.fields["trigger"]],
        [new.images, new.problem],
        js=new_lora.FLUSH,
        **quiet,
    )


def _wire_runs(run: run_page.RunPage) -> None:
    quiet = {"show_progress": "hidden", "api_visibility": "private"}
    again = {"fn": run_page.look_again, "inputs": [run.selected, run.seen], "outputs": run.outputs, **quiet}
    run.timer.tick(queue=False, **again)
    run.parts["list"].pick(run_page.pick, None, [*run.outputs, run.notice, run.sure], **quiet).then(
        None, None, None, js=run_page.ADDRESS, **quiet
    )
    run.stop.click(run_page.stop, run.selected, run.notice, **quiet).then(**again)
    run.go.click(run_page.go, [run.selected, run.total], run.notice, **quiet).then(**again)


def _wire_tabs(page, new, run, tabs, new_tab, runs_tab, draft_id, started, told) -> None:
    fields = [new.fields[key] for key in form.KEYS]
    quiet = {"show_progress": "hidden", "api_visibility": "private"}

    def opened(stored: str | None, request: gr.Request) -> list:
        """What a page that opens shows: the run that its address names or that is going on, else the three steps."""
        wanted = run_page.first_run(request.query_params.get("run", ""))
        draft = new_lora.load(stored)
        tab = gr.update(selected="runs") if wanted else gr.skip()
        return [*draft, *run_page.render(wanted, {}), tab, gr.Timer(active=bool(wanted))]

    page.load(
        opened,
        draft_id,
        [draft_id, new.images, new.problem, *fields, *run.outputs, tabs, run.timer],
        **quiet,
    ).then(None, None, None, js=run_page.OPENED, **quiet).then(lambda: True, None, new.loaded, **quiet)

    run.again.click(
        run_page.use_again,
        [run.selected, run.sure, draft_id],
        [run.notice, run.sure, new.images, new.problem, *fields, tabs],
        js=new_lora.FLUSH,
        **quiet,
    )

    def began(name: str, sentences: list) -> list:
        """Go and look at the run that was just started."""
        if not name:
            return [gr.skip()] * (len(run.outputs) + 3)
        kind = "bad" if sentences and "did not start" in sentences[0] else "info"
        note = run_page.notice(sentences, kind)
        return [*run_page.render(name, {}), note, gr.update(selected="runs"), gr.Timer(active=True)]

    new.start.click(
        new_lora.start, [draft_id, *fields], [new.problem, new.faults, started, told], js=new_lora.FLUSH, **quiet
    ).then(began, [started, told], [*run.outputs, run.notice, tabs, run.timer], **quiet).then(
        None, None, None, js=run_page.ADDRESS, **quiet
    )
    runs_tab.select(lambda: gr.Timer(active=True), None, run.timer, **quiet).then(
        None, None, None, js=run_page.ADDRESS, **quiet
    )
    new_tab.select(lambda: gr.Timer(active=False), None, run.timer, **quiet).then(
        None, None, None, js=run_page.ADDRESS, **quiet
    )


def allowed_paths() -> list[str]:
    """The only folders that the server hands files out of."""
    return [str(runs.outputs_dir()), str(runs.datasets_dir())]
