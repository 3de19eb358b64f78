"""The model hub: what is cached is not asked for again, a download that stands still ends, an upload holds nothing.

A file that is in the cache is taken from there without a request, and a tokenizer of which all that was ever asked for is
there is loaded as with `HF_HUB_OFFLINE=1` (its loader has questions of its own to the hub, some without any limit): a run
does not depend on a network that it does not need. A download may take hours as long as bytes arrive; when none have for `hub_timeout_s` the process ends, and the
next start resumes the partial file (a retry in the same process would wait for the lock that the stuck one holds).
Errors are retried twice. Uploads are extra copies: they get their time, then the run goes on without; the thread of
`--async_upload` is a daemon, waited for at the end for `upload_exit_s`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from guards import deadline
from sd_scripts_patches import exit as leaving
from sd_scripts_patches import session, timeouts
from sd_scripts_patches.patch import Patch, Target, wrap

T = TypeVar("T")
DOWNLOAD = "huggingface_hub.file_download"
UTIL = "library.huggingface_util"
STRATEGY = "library.strategy_base"
TRIES = 3
PAUSE_S = 2.0
POLL_S = 0.5

_uploads: list[threading.Thread] = []
_not_cached: list[str] = []  # files that were looked for in the cache alone and are not known there


def prepare(worker: bool) -> None:
    """Sockets of the hub's client get a limit of their own, before it is imported and reads them."""
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "10")
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "30")
    if not worker:
        leaving.before_leaving(finish_uploads)


def apply_to_download(module: ModuleType) -> None:
    """One file from the hub: cache first, then the network, watched."""

    def make(original: Callable) -> Callable:
        def hf_hub_download(repo_id, filename, **kwargs):
            if kwargs.get("local_files_only"):
                try:
                    return original(repo_id, filename, **kwargs)
                except FileNotFoundError:
                    _not_cached.append(filename)
                    raise
            plain = not any(kwargs.get(k) for k in ("force_download", "local_dir"))
            if plain:
                inside = "/".join(part for part in (kwargs.get("subfolder"), filename) if part)
                where = {k: kwargs.get(k) for k in ("cache_dir", "revision", "repo_type")}
                cached = module.try_to_load_from_cache(repo_id, inside, **where)
                if isinstance(cached, str):
                    return cached
            folder = Path(kwargs.get("local_dir") or kwargs.get("cache_dir") or module.constants.HF_HUB_CACHE)
            return watched(
                lambda: original(repo_id, filename, **kwargs), folder, f"{filename} of {repo_id} from the hub"
            )

        return hf_hub_download

    wrap(module, "hf_hub_download", make)


def watched(download: Callable[[], str], folder: Path, what: str) -> str:
    """`download()`, tried again after an error; the process ends once no byte has come for `hub_timeout_s`."""
    for attempt in range(1, TRIES + 1):
        try:
            return _while_bytes_come(download, folder, what)
        except OSError as error:  # requests' errors and the hub's are OSErrors; a missing file is not worth a retry
            missing = getattr(getattr(error, "response", None), "status_code", None) in (401, 403, 404)
            if missing or attempt == TRIES or isinstance(error, FileNotFoundError):
                raise
            session.say(f"{what}: {type(error).__name__}: {error}; trying again ({attempt} of {TRIES})")
            time.sleep(PAUSE_S * attempt)
    raise AssertionError("unreachable")


def _while_bytes_come(download: Callable[[], T], folder: Path, what: str) -> T:
    limit = timeouts.seconds("hub_timeout_s")
    outcome: list[tuple[bool, object]] = []

    def run() -> None:
        try:
            outcome.append((True, download()))
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            outcome.append((False, error))

    thread = threading.Thread(target=run, name=f"hangproof-hub {what}", daemon=True)
    thread.start()
    seen, since = -1, time.monotonic()
    while thread.is_alive():
        thread.join(0.01 if seen < 0 else POLL_S)
        size = _partial_bytes(folder)
        if size != seen:
            seen, since = size, time.monotonic()
            session.heartbeat().item(size >> 20, note=f"downloading {what}, MiB")
        elif limit and time.monotonic() - since > limit and thread.is_alive():
            deadline.expire(limit, f"a byte of {what}")
    good, value = outcome[0]
    if not good:
        raise value
    return value


def _partial_bytes(folder: Path) -> int:
    """Bytes in the partial files of a cache, or of a `local_dir`: what grows while a download is alive."""
    total = 0
    for pattern in ("*/blobs/*.incomplete", ".cache/huggingface/download/**/*.incomplete"):
        for path in folder.glob(pattern):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue  # it has just been completed
    return total


class OfflineFirst:
    """A tokenizer class that asks the hub only for what is not in the cache as a whole."""

    def __init__(self, inner: type) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def from_pretrained(self, name: str, *args: object, **kwargs: object) -> object:
        """As the class's own. A cache that a killed download left half-filled would do for the loader; not for us."""
        if os.path.isdir(name):
            return self.inner.from_pretrained(name, *args, **kwargs)
        _not_cached.clear()
        try:
            found = self.inner.from_pretrained(name, *args, **{**kwargs, "local_files_only": True})
        except Exception:
            if not _not_cached:
                raise
        if not _not_cached:
            return found
        from huggingface_hub import constants

        def load() -> object:
            return self.inner.from_pretrained(name, *args, **kwargs)

        return _while_bytes_come(load, Path(constants.HF_HUB_CACHE), f"the tokenizer {name} from the hub")


def apply_to_strategy(module: ModuleType) -> None:
    """Tokenizers: all families load theirs in one place."""

    def make(original: Callable) -> Callable:
        def _load_tokenizer(self, model_class, model_id, *args, **kwargs):
            return original(self, OfflineFirst(model_class), model_id, *args, **kwargs)

        return _load_tokenizer

    wrap(module, "TokenizeStrategy._load_tokenizer", make)


def apply_to_util(module: ModuleType) -> None:
    """Uploads and questions to the hub, as sd-scripts makes them."""
    wrap(module, "upload", _upload)
    wrap(module, "list_dir", _asked)
    wrap(module, "exists_repo", _asked)
    module.fire_in_thread = fire_in_daemon


def fire_in_daemon(function: Callable, *args, **kwargs) -> None:
    """As sd-scripts' `fire_in_thread`, but the thread cannot hold the exit."""
    thread = threading.Thread(target=function, args=args, kwargs=kwargs, name="hangproof-upload", daemon=True)
    _uploads.append(thread)
    thread.start()


def finish_uploads() -> None:
    """Give uploads that are still under way `upload_exit_s`, all together."""
    limit = time.monotonic() + timeouts.seconds("upload_exit_s")
    for thread in _uploads:
        thread.join(max(0.0, limit - time.monotonic()))
    late = sum(thread.is_alive() for thread in _uploads)
    if late:
        session.say(f"waited {timeouts.seconds('upload_exit_s'):g} s for {late} uploads to the hub; left behind")


def _upload(original: Callable) -> Callable:
    def upload(args, src, *rest, **kwargs):
        limit = timeouts.seconds("upload_timeout_s")
        what = f"the upload of {src if isinstance(src, (str, Path)) else 'a file'}"
        if not limit:
            return original(args, src, *rest, **kwargs)
        try:
            deadline.call(original, args, src, *rest, seconds=limit, what=what, **kwargs)
        except TimeoutError as error:
            session.say(f"{error}; the run goes on, the file is in the output folder")

    return upload


def _asked(original: Callable) -> Callable:
    def ask(*args, **kwargs):
        limit = timeouts.seconds("hub_timeout_s")
        if not limit:
            return original(*args, **kwargs)
        what = f"the hub to answer about {kwargs.get('repo_id') or (args[0] if args else 'a repository')}"
        return deadline.call(lambda: original(*args, **kwargs), seconds=limit, what=what)

    return ask


PATCH = Patch(
    name="hub",
    why="a hub that does not answer blocks the start; an upload in the background holds the exit",
    targets=(
        Target(DOWNLOAD, "hf_hub_download", params=("repo_id", "filename")),
        Target(
            DOWNLOAD, "try_to_load_from_cache", params=("repo_id", "filename", "cache_dir", "revision", "repo_type")
        ),
        Target(STRATEGY, "TokenizeStrategy._load_tokenizer", params=("self", "model_class", "model_id")),
        Target(UTIL, "upload", params=("args", "src")),
        Target(UTIL, "list_dir", params=("repo_id",)),
        Target(UTIL, "exists_repo", params=("repo_id",)),
        Target(UTIL, "fire_in_thread"),
    ),
    apply={DOWNLOAD: apply_to_download, STRATEGY: apply_to_strategy, UTIL: apply_to_util},
    prepare=prepare,
)
