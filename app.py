"""The door: `python app.py` serves the page on this machine.

What can be wrong is looked at before Gradio is imported (2 s): a port in use or a folder that cannot be written is told
at once. It listens on loopback; anyone else only with a password, because who reaches the page can start programs.
Only when the page has really answered is its address printed. Never imports torch.
"""

import argparse
import contextlib
import errno
import os
import signal
import socket
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

from presets import PresetError
from runs.files import RunError, explained
from runs.paths import data_root, datasets_dir, outputs_dir

ANSWER_S = 30  # seconds the page may take to answer itself
GRADIO_ENV = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "GRADIO_RUN_HISTORY": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="app.py", description="Hangproof's page.", allow_abbrev=False)
    top.add_argument("--port", type=int, default=7860, help="port to listen on (7860)")
    top.add_argument("--no-browser", action="store_true", help="do not open a browser")
    top.add_argument("--listen", action="store_true", help="answer other machines too; needs --auth")
    top.add_argument("--auth", metavar="USER:PASSWORD", help="ask for a name and a password")
    return top


def auth_of(args: argparse.Namespace) -> tuple[str, str] | None:
    """The name and password asked for.

    Raises:
        RunError: --listen without one, or one that is not USER:PASSWORD.
    """
    if args.listen and not args.auth:
        raise RunError(
            "--listen lets every machine of the network start programs here, so it needs a password; "
            "add --auth USER:PASSWORD"
        )
    if not args.auth:
        return None
    user, colon, password = args.auth.partition(":")
    if not (user and colon and password):
        raise RunError("--auth: write USER:PASSWORD, e.g. --auth me:a-long-password")
    return user, password


def check_port(host: str, port: int) -> None:
    """Refuse a port that cannot be had.

    Raises:
        RunError: it is in use, or reserved; says which is free.
    """
    if not 1 <= port <= 65535:
        raise RunError(f"--port {port}: give a number from 1 to 65535")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if os.name != "nt":  # there it would take a port from whoever has it
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EACCES:
                raise RunError(
                    f"port {port} is reserved for administrators; choose one above 1023: --port 7860"
                ) from error
            raise RunError(
                f"port {port} is in use, perhaps by a Hangproof that runs already (look at http://127.0.0.1:{port}); "
                f"choose another: --port {_free(host, port)}"
            ) from error


def _free(host: str, near: int) -> int:
    """A free port, the next one if it is."""
    for port in (*range(near + 1, min(near + 20, 65536)), 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return probe.getsockname()[1]
    return 7860


def check_folders() -> None:
    """Make the data folders and write into each.

    Raises:
        RunError: no permission, a full disk, a file in the way: with the folder's name and what to do.
    """
    for place in (outputs_dir(), datasets_dir()):
        with explained(f"write into the data folder {place}"):
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(b"hangproof")
                file.flush()


def serve(args: argparse.Namespace) -> None:
    """Check, build, launch; returns when the page has answered.

    Raises:
        RunError, PresetError: what stands in the way.
    """
    auth = auth_of(args)
    host = "0.0.0.0" if args.listen else "127.0.0.1"
    check_port(host, args.port)
    check_folders()
    os.environ.update(GRADIO_ENV)
    from ui.draft import tidy, uploads_dir

    tidy()
    os.environ["GRADIO_TEMP_DIR"] = str(uploads_dir())
    # The page asks itself whether it answers; a proxy of the environment must not stand between.
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost")))
    from starlette.middleware import Middleware

    from ui import page
    from ui.origin import OnlyThisMachine

    with contextlib.redirect_stdout(sys.stderr):
        page.build().queue(default_concurrency_limit=8).launch(
            server_name=host,
            server_port=args.port,
            auth=auth,
            prevent_thread_lock=True,
            quiet=True,
            share=False,
            inbrowser=False,
            show_error=True,
            ssr_mode=False,
            mcp_server=False,
            pwa=False,
            enable_monitoring=False,
            run_history=False,
            footer_links=[],
            allowed_paths=page.allowed_paths(),
            app_kwargs={"middleware": [] if args.listen else [Middleware(OnlyThisMachine)]},
            theme=page.theme(),
            css=page.css(),
            head=page.PAGE_HEAD,
        )
    answers(args.port)


def answers(port: int) -> None:
    """Fetch the page once. Raises RunError when it does not come."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/", timeout=ANSWER_S) as reply:
            reply.read()
    except OSError as error:
        raise RunError(
            f"the page does not answer on port {port} ({error}); choose another port: --port {port + 1}"
        ) from error


def main(argv: list[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM. Exit code 0; 1 with the reason on standard error; 2 wrong usage."""
    args = parser().parse_args(argv)
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    try:
        serve(args)
    except (RunError, PresetError) as error:
        print(f"hangproof: {error}", file=sys.stderr)
        return 1
    address = f"http://127.0.0.1:{args.port}"
    print(f"Hangproof is at {address}", flush=True)
    if args.listen:
        print(
            f"Other machines reach it at http://{socket.gethostname()}:{args.port}; your data is in {data_root()}",
            flush=True,
        )
    if not args.no_browser:
        import webbrowser

        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    while not over.wait(3600):
        pass
    print("Hangproof's page is closed; runs go on by themselves.", flush=True)
    # Gradio's threads have nothing left to save, and one that waits for a browser must not hold the exit.
    os._exit(0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    sys.exit(main())
