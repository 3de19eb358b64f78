"""Requests to a server of the page, as a browser, a program or an attacker sends them."""

import urllib.parse

from ui_helpers import Server

PASSWORD = "a-long-secret"
ask = Server.ask


def log_in(server: Server, password: str = PASSWORD, **options):
    """(status, headers, cookie) of a login. following: the address to open then."""
    form = {"username": "me", "password": password, "next": options.pop("following", "")}
    kind = {"Content_Type": "application/x-www-form-urlencoded"}
    status, headers, _ = ask(server, "POST", "/login", urllib.parse.urlencode(form), **kind, **options)
    return status, headers, "; ".join(one.split(";")[0] for one in headers.get_all("Set-Cookie") or [])


def upload(server: Server, name: str, content: bytes, **headers: str) -> int:
    """The status of an upload as the page sends it."""
    line = f'Content-Disposition: form-data; name="files"; filename="{name}"'.encode()
    body = b"--x\r\n" + line + b"\r\nContent-Type: text/plain\r\n\r\n" + content + b"\r\n--x--\r\n"
    return ask(server, "POST", "/gradio_api/upload", body, Content_Type="multipart/form-data; boundary=x", **headers)[0]


def files_with(text: str, folder) -> list[str]:
    """The names of the files below a folder that contain a text."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes())


def uploads(server: Server) -> list[str]:
    """Names of the files in the folder for uploads."""
    folder = server.data / "datasets" / ".uploads"
    return sorted(path.name for path in folder.rglob("*") if path.is_file())
