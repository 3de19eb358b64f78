"""Fetch model files from a hub: with progress, resumed where a download broke off, checked, and never waiting for ever.

Not huggingface_hub's downloader, because that deletes what it has when a process ends (since 1.0, file_download.py, a
unique temporary file a process): 20 of 24 GB would be loaded again. Plain HTTP ranges do it: what has come stays in
`.NAME.part`, with the ETag it belongs to, and the next call goes on from there. The hub names a file's SHA-256.
"""

import hashlib
import http.client
import json
import os
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import presets
from presets.tables import downloads
from runs.files import RunError, atomic_write, explained
from runs.paths import models_dir

READ_TIMEOUT_S = 30.0  # one read of the socket
STALL_S = 120.0  # no new byte for so long, retries included: given up
PAUSE_S = 2.0  # between retries
CHUNK = 1 << 20
REDIRECTS = (301, 302, 303, 307, 308)

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Remote:
    """A file on a server: where, how large (bytes, 0: unknown), its ETag, its SHA-256 ("" where the server names none)."""

    url: str
    size: int
    etag: str
    sha256: str


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Redirects are followed by hand: the hub's own headers are on the first answer, and a token stays with its host."""

    def redirect_request(self, *_args, **_kwargs):
        return None


def endpoint() -> str:
    """The hub: `$HF_ENDPOINT`, else huggingface.co."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def hub_home() -> Path:
    """Where the hub's own library keeps its things: `$HF_HOME`, else in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser()


def offline() -> bool:
    """Whether the user has set the hub offline."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def token() -> str | None:
    """The user's hub token, where one is set up."""
    if os.environ.get("HF_TOKEN"):
        return os.environ["HF_TOKEN"].strip()
    path = Path(os.environ.get("HF_TOKEN_PATH") or hub_home() / "token")
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def missing_files(model: str) -> dict[str, Path]:
    """The model files of a base model that are not there yet, by flag."""
    files = presets.models()[model]["files"]
    return {flag: path for flag, name in files.items() if not (path := models_dir() / name).is_file()}


def fetch_model(model: str, tell: Progress = lambda *_: None, stall_s: float = STALL_S) -> list[Path]:
    """Fetch the model files that sd-scripts needs and that are missing.

    Args:
        model: key or name of a base model. tell: called with (file name, bytes so far, bytes in all), often.

    Returns:
        The files that were fetched.

    Raises:
        RunError: offline, no access, not found, no space, stalled or damaged; says what to do. What has come is kept.
    """
    key = presets.find_model(model)
    entry = presets.models()[key]
    if entry["generated"]:
        raise RunError(f"{key} is generated on this machine; there is nothing to fetch")
    if not entry["files"]:
        raise RunError(f"{key} has no single model files; the diffusers backend fetches {entry['repo']} by itself")
    sources, fetched = downloads(), []
    for flag, path in missing_files(key).items():
        source = sources.get(path.name)
        if source is None:
            raise RunError(
                f"nobody knows where {path.name} (--{flag}) comes from; put it at {path}, or add [downloads] to models.toml"
            )
        with explained(f"fetch {path.name}"):
            fetch(source["repo"], source["path"], path, source.get("sha256", ""), tell, stall_s)
        fetched.append(path)
    return fetched


def fetch(
    repo: str, file: str, target: Path, sha256: str = "", tell: Progress = lambda *_: None, stall_s: float = STALL_S
) -> None:
    """Fetch one file of a hub repository to `target`, going on where an earlier call broke off.

    Raises:
        RunError: see fetch_model. OSError: the disk.
    """
    from filelock import FileLock, Timeout

    if offline():
        raise RunError(f"HF_HUB_OFFLINE is set, so {target.name} is not fetched; unset it, or put the file at {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(str(target.with_name(f".{target.name}.lock")))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RunError(f"{target.name} is being fetched by another process; wait for it") from error
    try:
        url = f"{endpoint()}/{repo}/resolve/main/{urllib.parse.quote(file)}"
        _fetch(url, repo, target, sha256.lower(), tell, stall_s)
    finally:
        lock.release()


def _fetch(url: str, repo: str, target: Path, sha256: str, tell: Progress, stall_s: float) -> None:
    part, note = target.with_name(f".{target.name}.part"), target.with_name(f".{target.name}.part.json")
    last = time.monotonic()
    remote = None
    while True:
        try:
            if remote is None:
                remote = _look(url, repo, target)
                _forget_other(part, note, remote)
                _check_space(part, target, remote)
            for _ in _receive(remote, part, target, repo, tell):
                last = time.monotonic()
            break
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            if time.monotonic() - last + PAUSE_S > stall_s:
                raise _stalled(error, url, target, part, stall_s) from error
            time.sleep(PAUSE_S)
    wanted = sha256 or remote.sha256
    if wanted and (found := _sha256(part, remote.size, tell, target.name)) != wanted:
        part.unlink(missing_ok=True)
        note.unlink(missing_ok=True)
        raise RunError(
            f"{target.name} arrived damaged (SHA-256 {found[:12]}…, not {wanted[:12]}…) and was deleted; fetch it again"
        )
    os.replace(part, target)
    note.unlink(missing_ok=True)


def _stalled(error: Exception, url: str, target: Path, part: Path, stall_s: float) -> RunError:
    host = urllib.parse.urlsplit(url).netloc
    reason = getattr(error, "reason", None) or error or type(error).__name__
    have = f"; the {part.stat().st_size} bytes that came are kept" if part.exists() and part.stat().st_size else ""
    return RunError(
        f"no data from {host} for {stall_s:.0f} s ({reason}){have}. Check the network and fetch again, "
        f"or put {target.name} at {target} yourself"
    )


def _open(url: str, headers: dict[str, str], method: str) -> http.client.HTTPResponse:
    """One request, errors and redirects returned as answers. Raises URLError, TimeoutError, HTTPException."""
    request = urllib.request.Request(
        url, headers={"User-Agent": "hangproof", "Accept-Encoding": "identity", **headers}, method=method
    )
    try:
        return urllib.request.build_opener(_NoRedirect).open(request, timeout=READ_TIMEOUT_S)
    except urllib.error.HTTPError as answer:
        return answer


def follow(url: str, headers: dict[str, str], method: str) -> list[http.client.HTTPResponse]:
    """All answers on the way to the file; the token goes to the hub's own host only."""
    answers, secret, host = [], token(), urllib.parse.urlsplit(url).netloc
    for _ in range(10):
        same = urllib.parse.urlsplit(url).netloc == host
        with_token = {"Authorization": f"Bearer {secret}"} if secret and same else {}
        answer = _open(url, {**headers, **with_token}, method)
        answers.append(answer)
        if answer.status not in REDIRECTS or not answer.headers.get("Location"):
            return answers
        answer.close()
        url = urllib.parse.urljoin(url, answer.headers["Location"])
    raise RunError(f"{url}: too many redirects; check HF_ENDPOINT")


def _look(url: str, repo: str, target: Path) -> Remote:
    """Ask for a file's size and hash."""
    answers = follow(url, {}, "HEAD")
    answers[-1].close()
    _check_status(answers[-1].status, url, repo, target)

    def header(*names: str) -> str:
        found = (answer.headers.get(name) for name in names for answer in answers)
        return next((value for value in found if value), "")

    etag = header("X-Linked-ETag", "ETag").removeprefix("W/").strip('"')
    size = header("X-Linked-Size") or answers[-1].headers.get("Content-Length") or "0"
    is_hash = len(etag) == 64 and all(c in "0123456789abcdef" for c in etag.lower())
    return Remote(url, int(size), etag, etag.lower() if is_hash else "")


def _check_status(status: int, url: str, repo: str, target: Path) -> None:
    page = f"{endpoint()}/{repo}"
    if status in (401, 403):
        raise RunError(
            f"no access to {repo}: accept its licence at {page}, then set HF_TOKEN to a token of yours (or run `hf auth login`), "
            f"or put {target.name} at {target} yourself"
        )
    if status in (404, 410):
        raise RunError(
            f"{url} does not exist; correct [downloads] in models.toml, or put {target.name} at {target} yourself"
        )
    if status >= 500 or status in (408, 429):
        raise ConnectionError(f"the server answers {status}")
    if status >= 400:
        raise RunError(f"{url}: the server answers {status}; check HF_ENDPOINT")


def _forget_other(part: Path, note: Path, remote: Remote) -> None:
    """Keep what an earlier call got only if it is of the same file."""
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = None
    same = known == {"etag": remote.etag, "size": remote.size} and remote.etag
    if part.exists() and (not same or (remote.size and part.stat().st_size > remote.size)):
        part.unlink()
    atomic_write(note, json.dumps({"etag": remote.etag, "size": remote.size}))


def _check_space(part: Path, target: Path, remote: Remote) -> None:
    have = part.stat().st_size if part.exists() else 0
    free = shutil.disk_usage(target.parent).free
    if remote.size - have > free:
        raise RunError(
            f"{target.name} needs {(remote.size - have) / 1e9:.1f} GB more, but {target.parent} has {free / 1e9:.1f} GB free; "
            "free some space, or set HANGPROOF_DATA to a folder on another disk"
        )


def _receive(remote: Remote, part: Path, target: Path, repo: str, tell: Progress):
    """Append what is missing to the part file; yields after each piece.

    Raises: ConnectionError and its like when the rest did not come; the pieces that came are kept.
    """
    have = part.stat().st_size if part.exists() else 0
    if remote.size and have == remote.size:
        return
    answers = follow(remote.url, {"Range": f"bytes={have}-"} if have else {}, "GET")
    with answers[-1] as answer:
        if answer.status == 416:
            part.unlink(missing_ok=True)
            raise ConnectionError("the server has another file by now")
        _check_status(answer.status, remote.url, repo, target)
        if answer.status != 206:
            have = 0  # the server sends all of it again
        with part.open("ab" if have else "wb") as file:
            tell(target.name, have, remote.size)
            while piece := answer.read1(CHUNK):  # read would throw away what came before a time-out
                file.write(piece)
                have += len(piece)
                tell(target.name, have, remote.size)
                yield
            file.flush()
            os.fsync(file.fileno())
    if remote.size and have != remote.size:
        if have > remote.size:
            part.unlink()
        raise ConnectionError(f"the connection ended after {have} of {remote.size} bytes")


def _sha256(part: Path, size: int, tell: Progress, name: str) -> str:
    total, done = hashlib.sha256(), 0
    with part.open("rb") as file:
        while piece := file.read(CHUNK * 8):
            total.update(piece)
            done += len(piece)
            tell(f"{name} (checking)", done, size)
    return total.hexdigest()
