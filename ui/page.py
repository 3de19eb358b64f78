"""The complete page: its four tabs and the events between them."""

import copy
from typing import Any
from urllib.parse import quote

import gradio as gr

from ui import doctor_page, scripts
from ui.html import esc
from ui.new import form, new_lora
from ui.run import fleet_page, run_page, view
from ui.run.fold import QUIET

MARK = (
    '<svg viewBox="0 0 32 32" width="30" height="30" aria-hidden="true"><rect width="32" height="32" rx="8" fill="#0f766e"/>'
    '<path d="M6 17h5l3-8 5 15 3-7h4" fill="none" stroke="#fff" stroke-width="2.6" stroke-linecap="round" '
    'stroke-linejoin="round"/></svg>'
)
HEADER = (
    f'<header class="hp-top">{MARK}<div><h1>Hangproof</h1>'
    "<p>Train a LoRA. Every run you start finishes, or stops with the reason and loses nothing.</p></div>{log_out}</header>"
)
LOG_OUT = (
    '<form class="hp-logout" method="post" action="logout"><button class="hp-button hp-quiet">Log out</button></form>'
)
ICON = "data:image/svg+xml," + quote(MARK.replace("<svg ", "<svg xmlns='http://www.w3.org/2000/svg' "))
PAGE_HEAD = f'<link rel="icon" href="{ICON}">'


def theme() -> gr.themes.Base:
    """The theme. It uses system fonts only, because a page that needs a font server does not open offline."""
    return gr.themes.Base(
        primary_hue="teal",
        secondary_hue="teal",
        neutral_hue="slate",
        radius_size="md",
        font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"],
    ).set(  # contrast of at least 4.5 to 1, which the base theme does not reach
        body_text_color_subdued="*neutral_500",
        block_label_text_color="*neutral_700",
        block_title_text_color="*neutral_800",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_800",
        body_background_fill="#f7f9fb",
        body_background_fill_dark="*neutral_950",
        background_fill_primary_dark="*neutral_900",
        block_background_fill_dark="*neutral_900",
        input_background_fill="white",
        input_border_width="1px",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
        input_background_fill_dark="*neutral_800",
        checkbox_label_background_fill="*neutral_50",
        checkbox_label_background_fill_dark="*neutral_800",
        checkbox_label_background_fill_hover="*neutral_100",
        checkbox_label_background_fill_hover_dark="*neutral_700",  # the usual one is too light for its text
        color_accent="*primary_700",
        border_color_accent="*primary_700",
        link_text_color="*primary_700",
    )


TABS = {"new": "New LoRA", "runs": "Runs", "fleet": "Other machines", "doctor": "Doctor"}  # id: label
# Puts the tab into the page's address; that of a run is put there by ui/run/run_address.js. The timers that read the
# runs, here and on other machines, work while their tab is shown, and not while the page is hidden. The browser looks
# which one that is: of two events, Gradio (6.31) repeats the first one's data for the second (dispatch in its
# Blocks.js, "always_last"), or answers them in any order.
WATCH = """async () => {
  let tab;
  for (let tries = 0; !tab && tries < 20; tries += 1) { // until the tab is drawn: a narrow page moves it out of its menu
    await new Promise((done) => setTimeout(done, 20 * tries));
    tab = document.querySelector('#tabs [role=tab][aria-selected=true]')?.dataset.tabId;
  }
  if (tab && tab !== 'runs' && document.body.classList.contains('hp-open')) {
    const url = new URL(window.location);
    if (tab === 'new') url.searchParams.delete('tab'); else url.searchParams.set('tab', tab);
    window.history.replaceState(null, '', url);
  }
  return ['runs', 'fleet'].map((one) => ({ __type__: 'update', active: one === tab && !document.hidden }));
}"""
# Gradio's browser code (6.31, templates/frontend/assets) reads none of these: they are for its server and its API.
UNREAD = (
    "skip_api",
    "api_info",
    "api_info_as_input",
    "api_info_as_output",
    "example_inputs",
    "api_description",
    "collects_event_data",
    "max_batch_size",
    "preserved_by_key",
)


SKIPPED = gr.skip()


class Page(gr.Blocks):
    """Gradio's page with a smaller config, which each visit downloads."""

    async def process_api(self, *args: Any, **kwargs: Any) -> Any:
        """What an event sends. Gradio shows the text of an error as markup, and it can be that of a file or of its name."""
        try:
            return await super().process_api(*args, **kwargs)
        except Exception as error:
            raise gr.Error(esc(getattr(error, "message", error))) from error

    def get_config_file(self) -> Any:
        """The config without the digests of the components' classes, which Gradio needs only for components of other
        packages, and without what no browser reads: every event of this page is private."""
        config = super().get_config_file()
        for component in config["components"]:
            component["component_class_id"] = component["type"]
        parts = [*config["components"], *(one["props"] for one in config["components"]), *config["dependencies"]]
        for key in UNREAD:
            for part in parts:
                part.pop(key, None)
        return config

    async def postprocess_data(self, block_fn: Any, predictions: Any, state: Any) -> list[Any]:
        """What Gradio sends for the values that an event returned. Gradio makes the component of each `gr.skip()` anew,
        and the page's timer skips nearly all of them each second; here such an output costs nothing."""
        outputs = block_fn.outputs
        if block_fn.batch or not (isinstance(predictions, list | tuple) and len(predictions) == len(outputs) > 1):
            return await super().postprocess_data(block_fn, predictions, state)
        kept = [n for n, one in enumerate(predictions) if not (isinstance(one, dict) and one == SKIPPED)]
        data: list[Any] = [None if block.stateful else gr.skip() for block in outputs]
        if kept:
            part, values = copy.copy(block_fn), [predictions[n] for n in kept]
            part.outputs = [outputs[n] for n in kept]
            found = await super().postprocess_data(part, values if len(kept) > 1 else values[0], state)
            for n, value in zip(kept, found, strict=True):
                data[n] = value
        return data


def build(login: bool = False) -> gr.Blocks:
    """Build the page, with a log-out button where it needs a `login`; nothing runs until it is launched."""
    with Page(title="Hangproof", analytics_enabled=False, delete_cache=(3600, 86400)) as page:
        draft_id = gr.BrowserState(None, storage_key="hangproof-draft", secret="hangproof")
        started = gr.State("")
        messages = gr.State([])
        header = gr.HTML(
            HEADER.format(log_out=LOG_OUT if login else ""),
            js_on_load=scripts.loader("header", "seen"),
            apply_default_css=False,
        )
        with gr.Tabs(elem_id="tabs") as tabs:
            with gr.Tab(TABS["new"], id="new"):
                note = gr.HTML(elem_id="new-note", apply_default_css=False)
                new = new_lora.build(draft_id, started, messages)
            with gr.Tab(TABS["runs"], id="runs"):
                run = run_page.build()
            with gr.Tab(TABS["fleet"], id="fleet"):
                fleet_timer = fleet_page.build()
            with gr.Tab(TABS["doctor"], id="doctor") as doctor_tab:
                doctor_page.build(doctor_tab)

        timers = [run.timer, fleet_timer]
        page.load(
            opened,
            draft_id,
            [draft_id, *new.outputs, *run.outputs, new.intro, tabs, *timers],
            js=new_lora.DRAFT,
            show_progress_on=run.notice,  # see run_page.build
            **QUIET,
        ).then(None, [draft_id, new.images, *new.fields], new.fields, js=new_lora.RESTORE, **QUIET).then(
            None, None, None, js=run_page.OPENED, **QUIET
        )
        run.copy.click(
            run_page.copy_to_new_lora,
            [run.selected, run.confirmed, draft_id],
            [run.notice, run.confirmed, new.images, note, tabs],
            js=form.FLUSH,
            **QUIET,
        ).then(None, None, None, js=run_page.SHOW_NOTE, **QUIET).then(None, None, None, js=form.SYNC, **QUIET)
        shown = [*run.outputs, run.notice, note, tabs, run.timer]

        def show_started(name: str, lines: list[Any]) -> list[Any]:
            """Select the run that was just started."""
            if not name:
                return [gr.skip()] * len(shown)
            kind = "bad" if lines and "did not start" in lines[0] else "info"
            text = run_page.notice(lines, kind)
            return [*run_page.render(name, ""), text, "", gr.update(selected="runs"), gr.Timer(active=True)]

        for event in new.begun:
            event.then(show_started, [started, messages], shown, **QUIET)
        for event in (tabs.change, header.seen):
            event(None, None, timers, js=WATCH, **QUIET)
    return page


def opened(stored: str | None, request: gr.Request) -> list[Any]:
    """What a newly opened page shows: the run or the tab in its address, else a running one, else the New LoRA tab. The
    offer of an example run is for those who have not finished one."""
    asked = request.query_params.get("tab", "")
    selected = run_page.first_run(request.query_params.get("run", ""))
    shown = asked if asked in TABS else "runs" if selected else ""
    draft = new_lora.load(stored)
    intro = gr.update(visible=not any(one.state == "completed" for one in view.read_all()))
    tab = gr.update(selected=shown) if shown else gr.skip()
    active = [gr.Timer(active=shown == "runs"), gr.Timer(active=shown == "fleet")]
    return [*draft, *run_page.render(selected or run_page.newest(), ""), intro, tab, *active]
