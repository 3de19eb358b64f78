"""A bucket of the Hugging Face hub: hf://buckets/OWNER/NAME/…, through huggingface_hub and its transfer library hf_xet.

The contents go to the hub's content-addressed storage, which sends a piece that it knows only once; then one call adds the
file to the bucket, so a file is visible completely or not at all. Streams of hf_xet are used, because a stream can be sent and
read slowly and in parts. A bucket has no conditional write: `exclusive` is False, and a lease waits and reads again.

The token is the library's own: `hf auth login`, or HF_TOKEN. The bucket is made, private, by the first write.
"""

import contextlib
import errno
from collections.abc import Callable, Sequence
from typing import Any

import hf_xet
import httpx2
from huggingface_hub import HfApi
from huggingface_hub._buckets import BucketFile, BucketFolder, _BucketAddFile
from huggingface_hub.errors import BucketNotFoundError, EntryNotFoundError, HfHubHTTPError, LocalTokenNotFoundError
from huggingface_hub.utils._xet import (
    XetTokenType,
    get_xet_session,
    xet_connection_info_refresh_url,
    xet_headers_without_auth,
)

from launch.store.kind import Entry, Meter, StoreError

BLOCK = 1 << 20


def make(scheme: str, body: str) -> tuple["HubKind", str]:
    """The kind of an address without `hf://`, and the prefix of all its names."""
    parts = body.split("/")
    if len(parts) < 3 or parts[0] != "buckets":
        raise StoreError(f"hf://{body}: write hf://buckets/OWNER/NAME/folder; models and data sets cannot be a store")
    return HubKind("/".join(parts[1:3])), "/".join(parts[3:])


class HubKind:
    """The files of one bucket."""

    exclusive = False
    failures: tuple[type[Exception], ...] = (
        *(HfHubHTTPError, httpx2.HTTPError, LocalTokenNotFoundError),
        *(RuntimeError, hf_xet.XetAuthenticationError, hf_xet.XetObjectNotFoundError),
    )

    def __init__(self, bucket: str, api: HfApi | None = None):
        self.bucket = bucket
        self.api = api or HfApi(library_name="hangproof")
        self._is_there = False

    def prove(self, prefix: str) -> None:
        """Nothing to find out: a bucket has no conditional write."""

    def _info(self, name: str) -> BucketFile:
        """The row of a file. Raises FileNotFoundError."""
        found = _found(lambda: list(self.api.get_bucket_paths_info(self.bucket, [name])))
        if not found:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return found[0]

    def size(self, name: str) -> int:
        """The size in bytes."""
        return int(self._info(name).size)

    def read(self, name: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start`."""
        info = self._info(name)
        end = min(int(info.size), start + length)
        if end <= start:
            return b""
        group = get_xet_session().new_download_stream_group(**self._connection(XetTokenType.READ))
        stream = group.download_stream(hf_xet.XetFileInfo(info.xet_hash, info.size), start=start, end=end)
        data = b"".join(stream)
        if len(data) != end - start:
            raise OSError(errno.EIO, f"{len(data)} bytes arrived instead of {end - start}", name)
        return data

    def put(self, name: str, source: bytes | str, meter: Meter) -> None:
        """Replace a file."""
        if not self._is_there:
            try:
                self.api.bucket_info(self.bucket)
            except BucketNotFoundError:
                self.api.create_bucket(self.bucket, private=True, exist_ok=True)
            self._is_there = True
        # What batch_bucket_files would upload itself is streamed here; it then adds the file by its hash.
        sent = 0

        def on_transfer(group: Any, _items: Any) -> None:
            nonlocal sent
            if group.total_transfer_bytes_completed > sent:
                sent = group.total_transfer_bytes_completed
                with contextlib.suppress(TimeoutError):
                    meter(0)  # still moving

        commit = get_xet_session().new_upload_commit(
            **self._connection(XetTokenType.WRITE), progress_callback=on_transfer
        )
        try:
            stream = commit.start_upload_stream(name=name, sha256=hf_xet.SKIP_SHA256)
            if isinstance(source, bytes):
                stream.write(source)
                meter(len(source))
            else:
                with open(source, "rb") as file:
                    while block := file.read(BLOCK):
                        stream.write(block)
                        meter(len(block))
            info = stream.finish().xet_info
            commit.wait_to_finish()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                commit.abort()
            raise
        row = _BucketAddFile(source=b"", destination=name, xet_hash=info.hash, size=info.file_size)
        self.api.batch_bucket_files(self.bucket, add=[row])

    def create(self, name: str, data: bytes) -> None:
        """Write a file that does not exist as far as can be seen. Raises FileExistsError."""
        with contextlib.suppress(FileNotFoundError):
            self._info(name)
            raise FileExistsError(errno.EEXIST, "exists already", name)
        self.put(name, data, lambda count: None)

    def list(self, prefix: str) -> dict[str, Entry]:
        """The files below the folder `prefix`."""
        rows = _found(lambda: list(self.api.list_bucket_tree(self.bucket, prefix.rstrip("/") or None, recursive=True)))
        files = [row for row in rows or [] if isinstance(row, BucketFile) and row.path.startswith(prefix)]
        return {row.path: Entry(int(row.size), row.mtime.timestamp() if row.mtime else None) for row in files}

    def folders(self, prefix: str) -> Sequence[str]:
        """The folders directly in `prefix`."""
        rows = _found(lambda: list(self.api.list_bucket_tree(self.bucket, prefix.rstrip("/") or None, recursive=False)))
        inside = [row for row in rows or [] if row.path.startswith(prefix)]
        return [row.path.removeprefix(prefix).rstrip("/") for row in inside if isinstance(row, BucketFolder)]

    def delete(self, names: Sequence[str]) -> None:
        """Delete files."""
        _found(lambda: self.api.batch_bucket_files(self.bucket, delete=list(names)))

    def refusal(self, error: Exception) -> str:
        """Why repeating cannot help; "" where it may."""
        status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else 0
        if isinstance(error, LocalTokenNotFoundError | hf_xet.XetAuthenticationError) or status == 401:
            return "the hub does not know you; run `hf auth login`, or set HF_TOKEN"
        if status == 403:
            return "the token may not write this bucket; make one that may"
        if status in (402, 413, 507) or "quota" in str(error).lower() or "storage limit" in str(error).lower():
            return "no space is left there; free some space or raise the limit"
        return ""

    def reset(self) -> None:
        """Nothing: the library's session is that of the whole process, and another thread may be sending with it."""

    def _connection(self, kind: XetTokenType) -> dict[str, Any]:
        headers = self.api._build_hf_headers()
        url = xet_connection_info_refresh_url(
            token_type=kind, repo_id=self.bucket, repo_type="bucket", endpoint=self.api.endpoint
        )
        return {
            "token_refresh_url": url,
            "token_refresh_headers": headers,
            "custom_headers": xet_headers_without_auth(headers),
        }


def _found(call: Callable[[], Any]) -> Any:
    """The result of `call`; None where the bucket or the path does not exist."""
    try:
        return call()
    except (BucketNotFoundError, EntryNotFoundError):
        return None
