"""The entry point: `python app.py` serves the page on this machine.

The port and the data folders are checked before Gradio is imported, which takes 2 s, so that their errors appear at
once. The server listens on loopback, and its page needs a token (ui/token.py), because anyone who can open the page can
start programs. Other machines need a password. `ui/security.py` decides which requests reach the page. The server is
uvicorn, started here and not by Gradio, because in Gradio's own server nothing can stand in front of its answers to
other origins. The address is printed only after the server accepts connections. Never imports torch.
"""

import argparse
import contextlib
import ctypes
import errno
import gc
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from presets import PresetError
from runs.files import RunError
from runs.paths import ROOT, START, check_folders, data_root, datasets_dir

if TYPE_CHECKING:
    from starlette.types import ASGIApp

M_ARENA_MAX = -8  # malloc.h
START_S = 30  # seconds until the server must accept connections
WAIT_SLICE_S = 0.25  # Windows delivers Ctrl-C only between two waits
GRADIO_ENV = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "GRADIO_ANALYTICS_CACHE_FREQUENCY": "1000000000",  # it counts events in a pandas table after each, for a dashboard
    "GRADIO_DEFAULT_CONCURRENCY_LIMIT": "8",  # Blocks.queue(), which can set it too, makes all routes once more
    "GRADIO_RUN_HISTORY": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="app.py",
        description=f"Serve the Hangproof page. `{START} -h` lists all other commands.",
        epilog="The user name and password can also be in the variable HANGPROOF_AUTH, host names in "
        "HANGPROOF_ALLOWED_HOSTS (separated by commas). The variables do not show in the list of processes.",
        allow_abbrev=False,
    )
    top.add_argument("--port", type=int, default=7860, help="port to listen on (default: 7860)")
    top.add_argument("--no-browser", action="store_true", help="do not open a browser")
    top.add_argument("--listen", action="store_true", help="accept connections from other machines; needs a password")
    top.add_argument(
        "--auth",
        metavar="USER:PASSWORD",
        help="require this user name and password; other users of this machine can see it",
    )
    top.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="a host name under which a proxy serves the page, such as train.example.org or *.proxy.runpod.net; "
        "needs a password; can be repeated",
    )
    top.add_argument(
        "--no-token",
        action="store_true",
        help="let every user and program of this machine use the page, and thus run programs as you",
    )
    top.add_argument(
        "--mcp", action="store_true", help="also serve the API as tools of an MCP server, for AI assistants"
    )
    return top


def auth_of(args: argparse.Namespace) -> tuple[str, str] | None:
    """The user name and password to require; None where none is given.

    The variable is removed from the environment, so that trainers and their children do not get the password.

    Raises:
        RunError: a password is needed but missing, or what is given is not USER:PASSWORD.
    """
    variable = os.environ.pop("HANGPROOF_AUTH", "")
    where, text = ("HANGPROOF_AUTH", variable) if args.auth is None else ("--auth", args.auth)
    if args.auth is None and not variable:
        if args.listen or _given_hosts(args):
            why = "--listen lets every machine on the network" if args.listen else "a proxy lets others"
            raise RunError(
                f"{why} start programs here, so a password is required; add --auth USER:PASSWORD, "
                "or use the variable HANGPROOF_AUTH"
            )
        return None
    user, colon, password = text.partition(":")
    if not (user and colon and password):
        raise RunError(f"{where}: write USER:PASSWORD, for example me:a-long-password")
    return user, password


def _given_hosts(args: argparse.Namespace) -> list[str]:
    variable = os.environ.get("HANGPROOF_ALLOWED_HOSTS", "").split(",")
    return [*args.allow_host, *(name for name in variable if name.strip())]


def allowed_hosts(args: argparse.Namespace) -> tuple[str, ...]:
    """The names of --allow-host and HANGPROOF_ALLOWED_HOSTS.

    Raises:
        RunError: one is not a host name.
    """
    from ui.security import valid_host

    given = _given_hosts(args)
    found = tuple(filter(None, map(valid_host, given)))
    if wrong := [text for text in given if valid_host(text) is None]:
        raise RunError(
            f"--allow-host {wrong[0]}: write a host name without http:// and port, such as train.example.org or *.proxy.runpod.net"
        )
    return found


def check_port(host: str, port: int) -> None:
    """Check that the port is available.

    Raises:
        RunError: the port is in use, reserved or invalid; names an available one.
    """
    if not 1 <= port <= 65535:
        raise RunError(f"--port {port}: use a number from 1 to 65535")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if os.name != "nt":  # on Windows this option takes over a port that is in use
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EACCES:
                why = f"port {port} is reserved for administrators; use a port above 1023: --port 7860"
                raise RunError(why) from error
            with socket.create_server((host, 0)) as other:
                free = other.getsockname()[1]
            raise RunError(
                f"port {port} is in use; open http://127.0.0.1:{port} if Hangproof is already running, "
                f"or use another port: --port {free}"
            ) from error


def token_of(args: argparse.Namespace, auth: tuple[str, str] | None) -> str | None:
    """The token to require; None with --no-token.

    Raises:
        RunError: the token cannot be read or kept; --mcp would have neither a token nor an open page.
    """
    from ui import token

    if not args.no_token:
        return token.load()
    if auth is None:
        print(
            f"Warning: --no-token: every user of this machine, and every program that can connect to port {args.port}, "
            "can run programs with your permissions",
            file=sys.stderr,
            flush=True,
        )
    elif args.mcp:
        raise RunError("--mcp: assistants cannot log in with a password, they send the token; leave --no-token out")
    return None


def serve(args: argparse.Namespace) -> str:
    """Check, build and launch the page; returns the address to open once it accepts connections.

    Raises:
        RunError, PresetError: the page cannot be served.
    """
    share_memory()
    auth = auth_of(args)
    host = "0.0.0.0" if args.listen else "127.0.0.1"
    check_port(host, args.port)
    check_folders()
    token = token_of(args, auth)
    if args.mcp and util.find_spec("mcp") is None:
        package = f"gradio[mcp]=={metadata.version('gradio')}"
        raise RunError(f"--mcp needs the package mcp; install it with: .venv/bin/python -m pip install '{package}'")
    os.environ.update(GRADIO_ENV)
    gc.disable()  # collections find nothing in what is imported and built here, and take a tenth of the start
    from ui.dataset.draft import delete_expired, uploads_dir

    delete_expired()
    os.environ["GRADIO_TEMP_DIR"] = str(uploads_dir())
    with contextlib.redirect_stdout(sys.stderr):
        page = build(args, auth, token)
        gc.freeze()
        gc.enable()
        _listen(page, host, args.port)
    # A password is for people who do not have the token; the page then asks for it.
    return f"http://127.0.0.1:{args.port}" + (f"/?token={token}" if token and auth is None else "")


def share_memory() -> None:
    """Let all threads take memory from one arena. glibc (mallopt(3)) gives each thread one of its own and keeps there what
    it frees: with eight tabs open, the server grew by 1.6 MB a minute."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # musl has none
        libc.mallopt(M_ARENA_MAX, 1)


def build(args: argparse.Namespace, auth: tuple[str, str] | None, token: str | None) -> "ASGIApp":
    """The page behind its guard.

    Raises:
        RunError, PresetError: a table or an argument is invalid.
    """
    from fastapi import FastAPI

    from presets import defaults
    from ui import page
    from ui.api import server
    from ui.login import Login
    from ui.security import Guard, Hosts

    hosts = Hosts(args.listen, allowed_hosts(args))
    upload = defaults()["images"]["max_upload_mb"] * 1_000_000
    blocks = page.build(login=auth is not None)
    app = FastAPI(openapi_url=None)
    server.add(app, upload, f"http://127.0.0.1:{args.port}" if args.mcp else "", token)
    server.mount(app, blocks, "/", upload, mcp_server=False, footer_links=[], theme=page.theme(), head=page.PAGE_HEAD)
    login = Login(token, auth, datasets_dir(), args.port) if auth or token else None
    return Guard(app, hosts, upload, login, args.mcp)


def _listen(app: "ASGIApp", host: str, port: int) -> None:
    """Start the server in a thread; returns once it accepts connections.

    Raises:
        RunError: it does not start.
    """
    import uvicorn

    from ui.security import Connection

    # An access log would have the addresses with the token, and a warning is a line for each client that speaks no HTTP.
    # backlog: where no file can be opened any more, asyncio prints as many errors a second.
    quiet: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False, "backlog": 32}
    config = uvicorn.Config(app, host, port, http=Connection, ws="none", **quiet)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="server", daemon=True)
    thread.start()
    began = time.monotonic()
    while not server.started:
        if not thread.is_alive() or time.monotonic() - began > START_S:
            raise RunError(f"the page cannot be served on port {port}; use another port: --port {port + 1}")
        time.sleep(0.001)


def shown(address: str) -> str:
    """The address as it is printed: without the token where the output is a file that other users can read."""
    from ui.token import token_file

    output = os.fstat(1).st_mode
    bare, _, token = address.partition("/?token=")
    public = stat.S_ISREG(output) and (os.name == "nt" or output & 0o077)
    return f"{bare}; the page asks for the token in {token_file()}" if token and public else address


@contextlib.contextmanager
def opened(address: str) -> Iterator[None]:
    """Open the address in a browser.

    A browser's arguments show in the list of processes, so a token reaches it in a file that leads to the address and
    that only its account can read, as Jupyter does it. The file is in the data folder, because browsers that are snaps
    read no hidden folder of the user. On Windows, other users do not see the arguments.
    """
    import webbrowser

    def start(where: str) -> None:
        threading.Thread(target=webbrowser.open, args=(where,), daemon=True).start()

    if os.name == "nt" or "token=" not in address:
        start(address)
        yield
        return
    for left in datasets_dir().glob(".open-*.html"):  # of a server whose terminal was closed
        left.unlink(missing_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", prefix=".open-", suffix=".html", dir=datasets_dir(), encoding="utf-8"
    ) as file:
        file.write(
            f'<meta charset="utf-8"><meta http-equiv="refresh" content="0; url={address}"><a href="{address}">Open</a>'
        )
        file.flush()
        start(Path(file.name).resolve().as_uri())
        yield


def wait_for(closing: threading.Event) -> None:
    """Wait in short slices until `closing` is set."""
    while not closing.wait(WAIT_SLICE_S):
        pass


def main(argv: list[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM. Exit code 0; 1 with the reason on standard error; 2 for wrong usage."""
    args = parser().parse_args(argv)
    os.chdir(ROOT)  # of what the user named, every path is known by now (runs.paths.PLACES)
    closing = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: closing.set())
    try:
        address = serve(args)
    except (RunError, PresetError) as error:
        print(f"hangproof: {error}", file=sys.stderr)
        return 1
    print(f"Hangproof is running at {shown(address)}", flush=True)
    if args.listen:
        where = f"http://{socket.gethostname()}:{args.port}"
        print(f"From other machines: {where}; your data is in {data_root()}", flush=True)
    with contextlib.nullcontext() if args.no_browser else opened(address):
        wait_for(closing)
    with contextlib.suppress(OSError):  # who read this has ended first, as `| tee` does with Ctrl-C
        print("Page closed. Runs that were started continue.", flush=True)
    # Gradio's threads have nothing to save, and a thread that waits for a browser must not delay the exit.
    os._exit(0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    sys.exit(main())
