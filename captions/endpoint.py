"""Captions by a server that speaks OpenAI's protocol: Ollama, LM Studio, vLLM, llama.cpp, or a provider.

The key is read from an environment variable when a request is made, and is nowhere else: not in a file, a log, an
address or a message. A redirect is not followed, because it could carry the key to another host. Each request runs in a
thread with a limit for all of it: a server that sends a byte now and then would never reach the limit of a single read.
"""

import base64
import io
import ipaddress
import json
import os
import re
import threading
import time
import urllib.parse
from dataclasses import dataclass, replace
from typing import Any

from captions.text import NoCaption
from guards.deadline import call
from runs.files import RunError

LONGEST_SIDE = 1024  # pixels of the image that is sent
ANSWER_BYTES = 1 << 20
MOST_TOKENS = 400
OLD_LIMIT = b'"max_tokens": '
TRIES, REQUEST_S = 3, 120.0
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
BUSY = (408, 425, 429)
REFUSED = (400, 401, 403, 404, 405, 422)  # what a second request would not change
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True)
class Server:
    """Where to ask. variable: the name of the environment variable with the key, "" for none; limit_s: for one request."""

    url: str
    model: str
    prompt: str
    variable: str = ""
    limit_s: float = REQUEST_S


def checked(server: Server) -> Server:
    """The server, with the address of its chat completions. Raises RunError: the address is none, holds a key, or there
    is no model or no such variable. No message repeats the key."""
    text = server.url.strip()
    try:
        url = urllib.parse.urlsplit(text)
        good = url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
    except ValueError:
        good = False
    if not good or not re.fullmatch(r"[\x21-\x7e]{8,500}", text):
        raise RunError("Enter the server's address, such as http://127.0.0.1:11434/v1")
    if "@" in url.netloc or url.query or url.fragment:
        raise RunError(
            "The address must not hold a user, a password or a key; enter the name of the variable with the key"
        )
    if not server.model.strip():
        raise RunError("Enter the name of the model, as the server knows it")
    key_of(server)
    path = url.path.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
    address = urllib.parse.urlunsplit((url.scheme, url.netloc, path, "", ""))
    return replace(server, url=address, model=server.model.strip())


def key_of(server: Server) -> str:
    """The key; "" without a variable. Raises RunError: it is not the name of a variable that is set."""
    if not server.variable:
        return ""
    if not VARIABLE.fullmatch(server.variable):
        raise RunError(
            "Enter the name of the environment variable with the key, such as OPENAI_API_KEY, not the key itself"
        )
    key = os.environ.get(server.variable, "").strip()
    if not key:
        # The text could be a key that was typed by mistake, so it is not repeated.
        raise RunError(
            "No environment variable has the name that you entered for the API key; set it before you start Hangproof, and "
            "enter its name, not the key itself"
        )
    if not key.isascii() or not key.isprintable():
        raise RunError("The environment variable with the API key holds characters that no key has; set it again")
    return key


def ask(server: Server, image: Any) -> str:
    """The answer of a checked server for one image (PIL, RGB), after at most TRIES requests. Raises NoCaption."""
    body = json.dumps(_question(server, image)).encode()
    for number in range(TRIES - 1):
        try:
            return _answer(server, body)
        except NoCaption as error:
            if error.pause_s is None:
                raise
            time.sleep(min(max(PAUSE_S * 2**number, error.pause_s), LONGEST_PAUSE_S))
    return _answer(server, body)


def _question(server: Server, image: Any) -> dict[str, Any]:
    small = image.copy()
    small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=90)
    picture = {"url": "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()}
    content = [{"type": "text", "text": server.prompt}, {"type": "image_url", "image_url": picture}]
    return {
        "model": server.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": MOST_TOKENS,
        "stream": False,
    }


def _answer(server: Server, body: bytes) -> str:
    """The text of one request's answer. Raises NoCaption; `pause_s` is set where another try makes sense."""
    import httpx

    key = key_of(server)
    host = urllib.parse.urlsplit(server.url).netloc
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "hangproof"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    late = threading.Event()  # the limit as a whole is over; that of one read is longer, so that it never decides

    def request() -> tuple[int, bytes, str]:
        with (
            httpx.Client(
                timeout=2 * server.limit_s, trust_env=not _is_local(server.url), follow_redirects=False
            ) as client,
            client.stream("POST", server.url, content=body, headers=headers) as response,
        ):
            data = b""
            for piece in response.iter_raw():
                data += piece
                if late.is_set() or len(data) > ANSWER_BYTES:
                    break
            return response.status_code, data, response.headers.get("retry-after", "")

    try:
        status, data, retry_after = call(request, seconds=server.limit_s, what=f"an answer from {host}")
    except TimeoutError as error:
        late.set()
        raise NoCaption(f"{host} did not answer within {server.limit_s:g} s", pause_s=0.0) from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        why = _without(key, str(error) or type(error).__name__)
        raise NoCaption(f"{host} cannot be reached ({why})", pause_s=0.0) from error
    if len(data) > ANSWER_BYTES:
        raise NoCaption(f"{host} sent more than {ANSWER_BYTES >> 20} MB for one caption")
    if status == 400 and b"max_completion_tokens" in data and OLD_LIMIT in body:  # OpenAI's newer models
        return _answer(server, body.replace(OLD_LIMIT, b'"max_completion_tokens": '))
    if status != 200:
        text = f"{host} answered with HTTP status {status}{_reason(data, key)}"
        asked_s = float(retry_after) if retry_after.isdecimal() else 0.0
        pause_s = asked_s if status in BUSY or status >= 500 else None
        raise NoCaption(text, fatal=status in REFUSED or 300 <= status < 400, pause_s=pause_s)
    return _without(key, _text_of(data, host))


def _text_of(data: bytes, host: str) -> str:
    try:
        choice = json.loads(data)["choices"][0]
        content = choice["message"]["content"]
        if isinstance(content, list):  # in parts
            content = " ".join(part["text"] for part in content if part.get("type") == "text")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise NoCaption(f"{host} sent something else than a chat completion") from error
    if not content and choice.get("finish_reason") == "length":
        why = f"the model used all {MOST_TOKENS} tokens for its thoughts; use one that does not think before it answers"
        raise NoCaption(f"{host}: {why}")
    if not isinstance(content, str):
        raise NoCaption(f"{host} sent a completion without text")
    return content


def _reason(data: bytes, key: str = "") -> str:
    """What a server says about its refusal, without the key, short and on one line; "" where it says nothing."""
    try:
        found = json.loads(data)
        error = found.get("error", found.get("detail", found.get("message", "")))
        text = error.get("message", "") if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        return ""
    if not isinstance(text, str):
        return ""
    text = _without(key, text)  # before it is cut: a part of the key would stay
    line = " ".join(word for word in text.split() if word.isprintable())
    return f": {line[:300]}" if line else ""


def _without(key: str, text: str) -> str:
    return text.replace(key, "[key]") if key else text


def _is_local(url: str) -> bool:
    """Whether the address is this machine: no proxy is asked for it."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
