"""The model hub: cached files need no network, a stalled download ends the process, an upload never holds the exit.

A file in the cache is used without a request. A tokenizer whose cache is complete is loaded as with `HF_HUB_OFFLINE=1`,
because its loader makes requests of its own, some without a timeout. So a run does not depend on a network that it does
not need. Other files are downloaded by the library itself (kohya's trainers have one below 1, which resumes a partial
file over HTTP), with its own limits of one read (`HF_HUB_ETAG_TIMEOUT`, `HF_HUB_DOWNLOAD_TIMEOUT`) and without xet,
whose transfers they do not reach. What it lacks is added: a watchdog on bytes, and the hash of what arrived. A download
may take hours as long as bytes arrive; without any for `hub_timeout_s` the process ends and the next start resumes the
file. A hub that sends nothing for `hub_reach_s`, or cannot be asked, is out of reach for the rest of the process: it is
waited for once and not for each file, the library raises its own error, and code that can do without the file goes on.
Uploads are extra copies: each gets `upload_timeout_s`, then the run continues without it. The threads of
`--async_upload` are daemons; at the end the run waits `upload_exit_s` for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from guards import deadline, limits
from guards.download import digest_of
from guards.hub import DIGEST, Patience
from sd_scripts_patches import exit as exit_patch, session
from sd_scripts_patches.patch import Patch, Target, around, function

DOWNLOAD = "huggingface_hub.file_download"
UTIL = "library.huggingface_util"
TOKENIZERS = (
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase"),
    ("transformers.processing_utils", "ProcessorMixin"),
)
PARTIAL = ("*/blobs/*.incomplete", ".cache/huggingface/**/*.incomplete")
"""The partial files of a cache, and of a `local_dir`: they grow while a download makes progress."""
PIECE_BYTES = 1 << 20  # that the library writes at once; 10 MB as it comes, which a slow line needs minutes for

_watched = threading.local()  # `here`: a download of this thread is watched already
_upload_threads: list[threading.Thread] = []
_cache_misses: list[str] = []  # files that were looked up in the cache only and are not there
_out_of_reach = threading.Event()  # a request of this process had no answer


class Unreachable(ConnectionError):
    """The library still waits for a hub that is out of reach."""


def prepare(worker: bool) -> None:
    """Set the library's own limits before it is imported and reads them."""
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "10")
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "30")
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    if not worker:
        exit_patch.before_exit.append(wait_for_uploads)


@around
def _cache_first(original: Callable[..., str], repo_id: str, filename: str, **kwargs: Any) -> str:
    """Read a file from the cache first, then from the network, with a limit."""
    module = sys.modules[DOWNLOAD]
    module.constants.DOWNLOAD_CHUNK_SIZE = PIECE_BYTES
    if kwargs.get("local_files_only"):
        try:
            return original(repo_id, filename, **kwargs)
        except FileNotFoundError:
            _cache_misses.append(filename)
            raise
    if not (kwargs.get("force_download") or kwargs.get("local_dir")):
        inside = "/".join(part for part in (kwargs.get("subfolder"), filename) if part)
        where = {k: kwargs.get(k) for k in ("cache_dir", "revision", "repo_type")}
        cached = module.try_to_load_from_cache(repo_id, inside, **where)
        if isinstance(cached, str):
            return cached
    if _out_of_reach.is_set():
        return original(repo_id, filename, **{**kwargs, "local_files_only": True})
    folder = Path(kwargs.get("local_dir") or kwargs.get("cache_dir") or module.constants.HF_HUB_CACHE)
    try:
        path = download(lambda: original(repo_id, filename, **kwargs), folder, f"{filename} of {repo_id} from the hub")
    except Unreachable:
        return original(repo_id, filename, **{**kwargs, "local_files_only": True})
    blob = Path(os.path.realpath(path))  # in the cache, where its name is its hash
    if blob.parent.name == "blobs" and DIGEST.fullmatch(blob.name) and digest_of(blob, blob.name) != blob.name:
        blob.unlink()
        raise OSError(f"{filename} of {repo_id} arrived damaged and was deleted; start again to download it again")
    return path


def give_up(reason: str) -> None:
    """The hub is out of reach: nothing of this process waits for it from now on."""
    if not _out_of_reach.is_set():
        _out_of_reach.set()
        session.log(f"the hub is out of reach, so this process does not ask it again: {reason}")


def download(load: Callable[[], Any], folder: Path, what: str) -> Any:
    """Return `load()`, which downloads to `folder`. The process ends when no byte has arrived for `hub_timeout_s`.

    Raises Unreachable when the hub is out of reach.
    """
    from huggingface_hub.utils import LocalEntryNotFoundError

    patience = Patience(limits.seconds("hub_reach_s"), f"a byte of {what}")
    known, arrives = _partial(folder), False

    def watch() -> None:
        nonlocal known, arrives
        if (found := _partial(folder)) != known:
            known, arrives, patience.limit_s = found, True, limits.seconds("hub_timeout_s") or math.inf
            patience.progress()
            session.heartbeat().item(sum(found.values()) >> 20, note=f"downloading {what}, MiB")
        patience.report()
        if patience.left_s() <= 0:
            if arrives:
                deadline.expire(patience.limit_s, f"a byte of {what}")
            give_up(f"waited {patience.limit_s:.0f} s for {what}")
        if _out_of_reach.is_set():
            raise Unreachable(what)

    def run() -> Any:
        _watched.here = True
        return load()

    try:
        if getattr(_watched, "here", False):
            return load()
        return deadline.call(run, seconds=math.inf, what=what, waiting=watch)
    except LocalEntryNotFoundError as error:  # the library had no answer
        give_up(str(error.__cause__ or error))
        raise


def _partial(folder: Path) -> dict[Path, int]:
    """The sizes of the partial files."""
    sizes = {}
    for path in (path for pattern in PARTIAL for path in folder.glob(pattern)):
        try:
            sizes[path] = path.stat().st_size
        except FileNotFoundError:
            continue  # it has just been completed
    return sizes


@around
def _from_cache_first(
    original: Callable, cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
) -> object:
    """Load every tokenizer and processor from the cache first: all classes of transformers inherit this method, which
    itself would accept a cache that a killed download left incomplete."""
    name, load = pretrained_model_name_or_path, functools.partial(original, cls)
    if kwargs.get("local_files_only") or getattr(_watched, "here", False) or os.path.isdir(name):
        return load(name, *args, **kwargs)
    _cache_misses.clear()
    found: object = None
    failed: Exception | None = None
    try:
        found = load(name, *args, **{**kwargs, "local_files_only": True})
    except Exception as error:
        if not _cache_misses:
            raise
        failed = error
    if not _cache_misses:
        return found
    from huggingface_hub import constants

    cache = Path(str(kwargs.get("cache_dir") or constants.HF_HUB_CACHE))
    if not _out_of_reach.is_set():
        with contextlib.suppress(Unreachable):
            return download(lambda: load(name, *args, **kwargs), cache, f"the tokenizer {name} from the hub")
    if failed is not None:
        raise failed
    lacks = ", ".join(dict.fromkeys(_cache_misses))
    session.log(f"the tokenizer {name} is used as it is in the cache, without {lacks}, which could not be looked up")
    return found


def fire_in_daemon(function: Callable, *args: Any, **kwargs: Any) -> None:
    """Do what sd-scripts' `fire_in_thread` does, with a daemon thread, which cannot hold the exit."""
    thread = threading.Thread(target=function, args=args, kwargs=kwargs, name="hangproof-upload", daemon=True)
    _upload_threads.append(thread)
    thread.start()


def wait_for_uploads(limit_s: float = float("inf")) -> None:
    """Wait for the uploads in progress, at most `upload_exit_s` (and `limit_s`) seconds together."""
    pending = [thread for thread in _upload_threads if thread.is_alive()]
    if not pending:
        return
    allowed_s = min(limit_s, limits.seconds("upload_exit_s") or float("inf"))
    beat = session.heartbeat()
    if limit_s == float("inf"):  # a run that failed or was stopped has recorded its outcome; its phase is evidence
        note = f"waiting for {len(pending)} uploads to the hub"
        session.log(note)
        beat.phase("end", total=len(pending), note=note)
    end_s = time.monotonic() + allowed_s
    for number, thread in enumerate(pending, 1):
        while thread.is_alive() and (left_s := end_s - time.monotonic()) > 0:
            thread.join(min(left_s, 60.0))  # threading has a longest wait
        if not thread.is_alive():
            beat.item(number)
    late = sum(thread.is_alive() for thread in pending)
    if late:
        session.log(f"waited {allowed_s:g} s for {late} uploads to the hub; exiting without them")


@around
def _upload(original: Callable, args: Any, src: object, *rest: Any, **kwargs: Any) -> None:
    limit_s = limits.seconds("upload_timeout_s")
    what = f"the upload of {src if isinstance(src, (str, Path)) else 'a file'}"
    with session.phase("save", note=what):  # in phase "step" it would look like a hung step
        try:
            deadline.call(original, args, src, *rest, seconds=limit_s, what=what, **kwargs)
        except TimeoutError as error:
            session.log(f"{error}; the run continues, the file is in the output folder")


@around
def _query(original: Callable, *args: Any, **kwargs: Any) -> object:
    what = f"the hub to answer about {kwargs.get('repo_id') or (args[0] if args else 'a repository')}"
    limit_s = limits.seconds("hub_reach_s")
    waiting = Patience(limit_s, what).report
    return deadline.call(lambda: original(*args, **kwargs), seconds=limit_s, what=what, waiting=waiting)


INSTALLED = (
    function(DOWNLOAD, "hf_hub_download(repo_id, filename)", _cache_first),
    function(DOWNLOAD, "try_to_load_from_cache(repo_id, filename, cache_dir, revision, repo_type)"),
    *(
        function(
            module,
            f"{name}.from_pretrained(cls, pretrained_model_name_or_path)",
            _from_cache_first,
            optional=True,
            wait="the hub, for a tokenizer",
        )
        for module, name in TOKENIZERS
    ),
)
"""What is in the hub's own library, and in transformers."""


def uploads(module: str) -> tuple[Target, ...]:
    """Return the targets in the trainer's `module` of uploads, which is the same in both trainers."""
    return (
        function(module, "upload(args, src)", _upload, wait="an upload to the hub"),
        function(module, "list_dir(repo_id)", _query, wait="the hub to answer"),
        function(module, "exists_repo(repo_id)", _query, wait="the hub to answer"),
        Target(
            module,
            "fire_in_thread",
            beside="upload",
            make=lambda _: fire_in_daemon,
            wait="an upload in the background, at the exit",
        ),
    )


PATCH = Patch(
    name="hub",
    why="a hub that does not answer blocks the start; an upload in the background holds the exit",
    targets=(
        *INSTALLED,
        *uploads(UTIL),
    ),
    prepare=prepare,
)
MUSUBI = dataclasses.replace(PATCH, targets=(*INSTALLED, *uploads("musubi_tuner.utils.huggingface_utils")))
