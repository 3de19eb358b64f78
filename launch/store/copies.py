"""Copies a run's files to its store, and deletes old copies there.

A push writes what the store lacks, the largest last; lists it again, because a store may lose what it had confirmed;
and then writes the manifest. Each write happens only while the lease is held. So a push that is killed at any point
leaves the store with its earlier manifest, which is complete, and the next push sends only what is missing.

Pruning keeps the two newest manifests that are complete and all that they name. It deletes only contents that were in
the store before the push began, so nothing that another writer is just sending.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from launch.store.lease import Lease
from launch.store.manifest import FILES, MANIFESTS, Contents, Item, Local, Manifest, Memory, contents, order_of, parse
from launch.store.places import Place, Refused, StoreError, Unavailable
from monitor.process import platform
from runs.paths import datasets_dir

KEPT_MANIFESTS = 2
SMALL = 64 << 20  # bytes; up to this a file is read once, hashed and sent from memory: logs grow meanwhile


class NotHeld(StoreError):
    """The lease is not held, so nothing is written."""


def manifest_names(place: Place) -> dict[str, tuple[int, int]]:
    """The names of a run's manifests in the store, newest first, with their lease and number. Raises StoreError."""
    found = {name: order for name in place.list(MANIFESTS) if (order := order_of(name))}
    return dict(sorted(found.items(), key=lambda one: one[1], reverse=True))


def each_manifest(place: Place, run: str) -> Iterator[tuple[str, Manifest | None, str]]:
    """(name, manifest, why it cannot be used) of a run's manifests in the store, newest first.

    None: it is damaged. "": all that it names is listed with its size; the hashes are compared by a restore only.
    Raises Refused, Unavailable.
    """
    names = manifest_names(place)
    files = place.list(FILES) if names else {}
    for name in names:
        try:
            manifest = parse(place.read(name), name, run)
        except (Unavailable, Refused):
            raise
        except StoreError as error:
            yield name, None, str(error)
        else:
            lost = _missing(manifest, files)
            what = f"{name}: {len(lost)} of its files are missing in the store; it is not used"
            yield name, manifest, what if lost else ""


def newest_manifest(place: Place, run: str) -> Manifest | None:
    """The newest manifest whose contents are all listed with their sizes; None without one. Raises StoreError."""
    return next((manifest for _, manifest, why in each_manifest(place, run) if not why), None)


def _missing(manifest: Manifest, files: dict[str, int]) -> list[str]:
    return [name for name, member in manifest.files.items() if files.get(member.blob) != member.size]


class Copier:
    """Pushes one run to its place (STORE/SLUG) while the lease is held. For one thread."""

    def __init__(self, place: Place, folder: Path, lease: Lease, distrusted: Iterable[str] = ()):
        """distrusted: SHA-256 of contents that a restore found damaged; they are sent again."""
        self.place, self.folder, self.lease = place, folder, lease
        self.memory = Memory(folder)
        self.last: Manifest | None = None  # the newest that this object wrote, or found
        self._distrusted = set(distrusted)
        self._before: dict[str, int] = {}  # the contents in the store when the last push began

    def push(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> Contents:
        """Copy what changed, then write a manifest. Returns what the run has, with what was sent.

        on_progress: called with the bytes sent and the bytes to send, before and after each file.

        Raises NotHeld: the lease is not held. Refused, Unavailable, NotFound: the store failed; the next push continues.
        """
        self._check_lease()
        run = self.folder.name
        self.last = self.last or newest_manifest(self.place, run)
        orders = manifest_names(self.place).values()
        before = max((number for lease, number in orders if lease == self.lease.number), default=0)
        found = contents(self.folder, datasets_dir() / run, self.memory)
        self._before = self.place.list(FILES)
        newest, stored = found.step, self._before.keys()
        found.items = [  # without older states that the store lacks: saving may be faster than copying
            item
            for item in found.items
            if item.step in (-1, newest) or stored >= {local.blob for local in item.files.values()}
        ]
        self._send(found, on_progress)
        # The store keeps the last good state where this machine has none: one may have vanished while it was sent.
        last, kept = self.last, self.last.states() if self.last and found.step < 0 else {}
        carried = {name: last.files[name] for names in kept.values() for name in names} if last else {}
        step = last.step if last and carried else found.step
        carried |= found.kept_of(last) if last else {}
        owner, written_at, files = self.lease.owner.text(), platform.now().utc, {**carried, **found.files}
        now = Manifest(run, self.lease.number, before + 1, step, found.completed, owner, written_at, files)
        after = self.place.list(FILES) if found.sent_files else self._before
        if lost := _missing(now, after):
            what = f"{len(lost)} files that it had confirmed, such as {lost[0]}"
            raise Unavailable(f"{self.place.address} lost {what}; they are sent again")
        self._distrusted.clear()
        if not last or (last.lease, last.completed, last.hashes()) != (now.lease, now.completed, now.hashes()):
            self._check_lease()
            if not self.place.create(now.name, now.dumps()):
                raise NotHeld(f"{now.name} exists in {self.place.address}: another process writes this run")
            self.place.read(now.name)  # NotFound: lost, though it was confirmed; the next push writes it again
            self.last = found.manifest = now
        self.memory.synced = now.hashes()
        with contextlib.suppress(OSError):  # a full disk costs time at the next push
            self.memory.save(self.place.address)
        return found

    def prune(self) -> int:
        """Delete manifests and contents that nobody needs; returns the number of deleted files. Call it after `push`.

        Raises NotHeld, Refused, Unavailable: something is left, which the next call deletes.
        """
        self._check_lease()
        names = manifest_names(self.place)
        needed, kept, complete = set[str](), set[str](), 0
        for name, manifest, why in each_manifest(self.place, self.folder.name):
            if manifest is None:
                return 0  # what it needs is not known
            if manifest.lease > self.lease.number:
                raise NotHeld(f"{self.place.address}: a later holder of the lease wrote {name}; nothing was deleted")
            kept.add(name)
            needed |= {member.blob for member in manifest.files.values()}
            complete += not why
            if complete == KEPT_MANIFESTS:
                break
        if complete < KEPT_MANIFESTS or self.last is None or self.last.name not in kept:
            return 0  # nothing is unused, or the listing is an old one
        unused = [name for name in names if name not in kept]  # first: one without its contents would only cost time
        unused += [name for name in self._before if name not in needed]
        for name in unused:
            self._check_lease()
            self.place.delete([name])
        return len(unused)

    def _check_lease(self) -> None:
        if not self.lease.valid():
            who = f"; {self.lease.holder} holds it" if self.lease.holder else ""
            raise NotHeld(f"the lease of {self.place.address} is not held by this process{who}; nothing was written")

    def _send(self, found: Contents, on_progress: Callable[[int, int], None]) -> None:
        """Send what the store lacks. What cannot be read, or changes meanwhile, is left out as a whole, and noted."""
        stored = {n: size for n, size in self._before.items() if n.removeprefix(f"{FILES}/") not in self._distrusted}
        todo = {local.blob: local.size for local in found.files.values()}
        total, sent = sum(size for blob, size in todo.items() if stored.get(blob) != size), 0
        on_progress(0, total)
        for item in sorted(found.items, key=Item.order):
            for name, local in item.files.items():
                if stored.get(local.blob) == local.size:
                    continue
                self._check_lease()
                try:
                    now = self._send_file(local, stored, item.order()[0] == 0)
                except OSError as error:
                    found.notes.append(f"{item.state or name}: not copied: {error.strerror or error}")
                    found.items.remove(item)
                    found.unread += item.files
                    break
                item.files[name] = now
                if stored.get(now.blob) != now.size:
                    stored[now.blob] = now.size
                    sent += now.size
                    found.sent_files += 1
                    on_progress(sent, max(total, sent))

    def _send_file(self, local: Local, stored: dict[str, int], may_grow: bool) -> Local:
        """Send a file; returns it as it was sent. Raises OSError of the local file, also when it changed meanwhile."""
        if may_grow and local.size <= SMALL:
            data = local.path.read_bytes()
            now = replace(local, sha256=hashlib.sha256(data).hexdigest(), size=len(data))
            if stored.get(now.blob) != now.size:
                self.place.put(now.blob, data)
            return now
        self.place.put(local.blob, local.path)
        with contextlib.suppress(FileNotFoundError):
            if local.is_unchanged():
                return local
        self.place.delete([local.blob])
        raise OSError("it changed while it was sent; the next copy has it")
