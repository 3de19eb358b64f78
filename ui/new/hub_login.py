"""The Hugging Face login of the page: the hub library's own login and token store, which every tool here shares.

The token goes from the field to `huggingface_hub.login` and nowhere else: it is not in the draft, a log, a URL or a
message, and never goes back to the browser.
"""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gradio as gr

from guards import hub
from ui.html import esc, hub_link
from ui.new import form
from ui.run.fold import QUIET

LABEL = "Hugging Face account"
ANSWER_S = 20.0
TOKENS_PATH = "settings/tokens"


class LoginError(Exception):
    """The login failed. The message says why and what to do, and does not contain the token."""


def store(token: str) -> str:
    """Check a token with the hub and store it; returns the user's name.

    Raises:
        LoginError: the token is not valid, or the hub does not answer within ANSWER_S; nothing was stored.
    """
    token = (token or "").strip()
    if not re.fullmatch(r"[\x21-\x7e]{8,200}", token):
        raise LoginError("This is not a token. Copy the complete token from Hugging Face; it starts with hf_.")
    if hub.offline():
        raise LoginError("HF_HUB_OFFLINE is set, so Hangproof cannot contact Hugging Face; unset it and start again.")
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import httpx

    pool = ThreadPoolExecutor(1)  # the library itself waits without an end; app.py exits without waiting for a thread
    try:
        return pool.submit(_check_and_store, token).result(ANSWER_S)
    except HfHubHTTPError as error:
        known = {401: "Hugging Face does not know this token. Create a new one and copy it completely."}
        status = error.response.status_code
        raise LoginError(known.get(status, f"{hub.shown()} answers HTTP {status}; try again later.")) from None
    except (httpx.HTTPError, TimeoutError) as error:
        raise LoginError(f"{hub.shown()} cannot be reached ({type(error).__name__}); check the network.") from None
    except OSError as error:
        raise LoginError(f"The token cannot be stored ({error.strerror}): {error.filename}") from None
    except (ValueError, KeyError, TypeError):  # an organization's token, or not the hub's answer
        raise LoginError("Hugging Face does not accept this token. Use a token of your own account.") from None
    finally:
        pool.shutdown(wait=False)


def _check_and_store(token: str) -> str:
    import huggingface_hub

    huggingface_hub.login(token=token, skip_if_logged_in=False)
    return str(huggingface_hub.whoami(cache=True)["name"])


def forget() -> None:
    """Delete the token from the hub library's store. Other stored tokens stay.

    Raises:
        LoginError: HF_TOKEN is set, or the store cannot be written.
    """
    import huggingface_hub
    from huggingface_hub.utils import get_stored_tokens

    token = hub.token()
    try:
        names = [name for name, stored in get_stored_tokens().items() if stored == token]
        for name in names or [None]:
            huggingface_hub.logout(name)
    except OSError as error:
        if not hub.token():
            return  # only git's copy of the token, which the library removes too, is not accessible
        if isinstance(error, PermissionError):
            raise LoginError(f"The token cannot be deleted: {error.strerror}; delete {error.filename}.") from error
        raise LoginError("You are logged in by the variable HF_TOKEN; unset it and restart Hangproof.") from error


def status_html(name: str = "", error: str = "") -> str:
    """Who is logged in, or how to log in, as HTML."""
    problem = f'<p class="hp-hint hp-warn" role="alert" data-testid="hub-error">{esc(error)}</p>' if error else ""
    if name or hub.token():
        known = f"Logged in as <strong>{esc(name)}</strong>." if name else "A token is stored on this machine."
        return f'<p class="hp-hint" role="status" data-testid="hub-user">{known}</p>{problem}'
    link = hub_link(TOKENS_PATH, "Create a token on Hugging Face")
    return f'{problem}<p class="hp-hint">{link} (type “Read”), then paste it here. The token is kept in Hugging Face’s own store on this machine.</p>'


def draw(_: str) -> None:
    """Make the components of the fold."""
    status = gr.HTML(status_html(), elem_id="hub-status", apply_default_css=False)
    known = bool(hub.token())
    token = gr.Textbox(
        type="password", label="Access token", placeholder="hf_…", max_lines=1, elem_id="hub-token", interactive=True,
        visible=not known, html_attributes=gr.InputHTMLAttributes(autocomplete="off"),
    )  # fmt: skip
    log_in = gr.Button("Log in", visible=not known, elem_id="hub-log-in", size="sm")
    log_out = gr.Button("Log out", visible=known, elem_id="hub-log-out", size="sm")
    outputs = [status, token, log_in, log_out]

    def act(change: Callable[[], str | None]) -> list[Any]:
        """Only what can be done now is shown. After a failure the token stays in its field: it can be the network."""
        name, error = "", ""
        try:
            name = change() or ""
        except LoginError as failure:
            error = str(failure)
        known, field = bool(hub.token()), {} if error else {"value": ""}
        shown = [gr.update(visible=not known, **field), gr.update(visible=not known), gr.update(visible=known)]
        return [status_html(name, error), *shown]

    for event in (
        gr.on([log_in.click, token.submit], lambda token: act(lambda: store(token)), token, outputs, **QUIET),
        log_out.click(lambda: act(forget), None, outputs, **QUIET),
    ):  # what the model still needs may have changed
        event.then(None, None, None, js=form.SYNC, **QUIET)
