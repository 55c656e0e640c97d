"""Uploads of updates: admitted a few at a time, resumed from disk, validated before they count."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from msgspec.structs import asdict

from coordinator.core.moves import UpdateInvalid, UpdateStored
from coordinator.core.state import Changes
from coordinator.runtime.chunk_size import ChunkSizer
from coordinator.runtime.traffic import Traffic, counted
from coordinator.runtime.validate_update import Own, Rules, asked_layout, changes_of, check_sizes, check_update
from edgefl.aggregation.mean import Layout
from edgefl.errors import ProtocolError
from edgefl.models.spec import LAYERS, PROTOTYPES, SIGNATURE
from edgefl.protocol.chunks import Chunk, decode_chunks
from edgefl.protocol.messages import Grant, Need, Update
from edgefl.records import Attempt, Manifest, ObjectRef, Refusal
from edgefl.storage.objects import ObjectStore
from edgefl.storage.partials import Arrival
from edgefl.transfer.disk_driver import DiskReceiver, End, Superseded
from edgefl.transfer.receiver import Failed

#: 32 uploads x 16 chunks in flight are half of mosquitto's default queue of 1000 messages, beyond which it drops QoS 1
#: without a word (200 uploads at once lost two chunks of three when measured), and 48 MiB at 96 KiB. Few are enough to
#: fill a server's link: 32 devices at 10 Mbit/s bring 40 MB/s, and one on loopback 365 MB/s.
MOST_UPLOADS = 32
#: Seconds for which complete updates are gathered for each one that is expected, and at most: a batch costs a sync and
#: two switches of threads.
UPLOAD_S, MOST_GATHERED_S = 0.00025, 0.05
#: Updates that are less together are checked one after the other: threads would only get into each other's way.
_SMALL_BYTES = 4 * 2**20
#: Parts of an update whose bytes are a figure of their own in the bill.
_APART = {PROTOTYPES: "prototypes_up_bytes", SIGNATURE: "signature_up_bytes", LAYERS: "layer_up_bytes"}
#: The result of checking an upload's contents.
_Verdict = Refusal | tuple[Manifest, Changes] | Exception
#: ``map``, or that of a pool of threads.
_Map = Callable[[Callable[["_Upload"], _Verdict], Sequence["_Upload"]], Iterator[_Verdict]]


@dataclass
class _Upload:
    update: Update
    receiver: DiskReceiver[Arrival]  # not running: waits for admission
    previous: Manifest  # the parts as the device was offered them
    own: Own | None = None  # what bounds its prototypes
    asked: Layout | None = None  # of the layers that it may hold alone
    began: float = 0.0  # when it was asked for
    whole: bool = False  # its contents are being checked

    @property
    def receiving(self) -> bool:
        return self.receiver.running and not self.whole


class Uploads:
    """Receives the objects of updates.

    ``sizer``: how large chunks are; ``rules``: what an update of this run may hold; ``traffic`` counts what comes,
    whatever becomes of it. ``grant`` sends a message to a device; ``report`` takes UpdateStored and UpdateInvalid, and
    exceptions that end the run. ``urls``: where a device may put objects of a transfer (id -> bytes) past the broker.
    """

    def __init__(
        self,
        store: ObjectStore,
        sizer: ChunkSizer,
        rules: Rules,
        traffic: Traffic,
        *,
        clock: Callable[[], float],
        grant: Callable[[str, Grant], None],
        report: Callable[[UpdateStored | UpdateInvalid | BaseException], None],
        urls: Callable[[str, str, Mapping[str, int]], dict[str, str]] = lambda device, transfer, sizes: {},
    ) -> None:
        self._urls = urls
        self._store = store
        self._traffic = traffic
        self._sizer = sizer
        self._rules = rules
        self._clock = clock
        self._grant = grant
        self._report = report
        self._uploads: dict[str, _Upload] = {}  # by device, in the order of asking
        self._admitted: set[str] = set()  # devices whose updates are fetched or checked; the others wait
        self._waiting: list[_Upload] = []  # whole, to be checked next
        self._checking: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "checks")  # made when they have work
        self._reported: dict[str, tuple[ObjectRef, ...]] = {}  # of each device's last update that was reported
        self.dropped = 0  # messages of no upload, and malformed ones

    def fetch(
        self,
        update: Update,
        previous: Manifest,
        transfer: str,
        own: Own | None = None,
        *,
        layers: Sequence[str] = (),
        again: bool = True,
    ) -> None:
        """Fetch an update to the parts ``previous``, as the device was offered them; asked again, go on.

        ``own``: what bounds its prototypes; ``layers``: those it was asked for alone. ``again``: ask at once for what
        has not come of an upload in progress; else that is left to its receiver, which notices losses by itself.
        """
        device = update.device
        known = self._uploads.get(device)
        if known is not None and (known.update.attempt, known.update.manifest) == (update.attempt, update.manifest):
            if known.receiving and again:
                known.receiver.ask_again(self._clock())
            return
        self.cancel(device)

        def send(need: Need) -> None:
            if not need.done or upload.whole:  # the first time the acknowledgement says so
                urls = self._urls(device, transfer, {name: sizes[name] for name in need.missing})
                self._grant(device, Grant(**asdict(need), urls=urls))

        sizes = {ref.id: ref.size for ref in update.manifest.values()}
        self._traffic.name_upload(device, update.attempt, transfer)
        receiver = DiskReceiver(transfer, device, update.manifest.values(), self._store, send)
        asked = asked_layout(self._store, layers, previous) if layers else None
        self._uploads[device] = upload = _Upload(update, receiver, previous, own, asked)
        with self._rejecting(upload):
            if (refusal := check_sizes(update.manifest, previous, self._rules.transfer, asked)) is not None:
                self._reject(upload, refusal)
            else:
                self._admit()

    def on_chunk(self, device: str, transfer: str, payload: bytes) -> None:
        """Chunks came on a device's topic."""
        try:
            chunks = decode_chunks(payload)
        except ProtocolError:
            self.dropped += 1
            return
        self.take(device, transfer, chunks)

    def receiver(self, device: str, transfer: str) -> DiskReceiver[Arrival] | None:
        """The receiver of an upload that is being fetched."""
        upload = self._uploads.get(device)
        return upload.receiver if upload and upload.receiving and upload.receiver.transfer == transfer else None

    def take(self, device: str, transfer: str, chunks: Sequence[Chunk]) -> None:
        """Chunks of an upload came."""
        upload = self._uploads.get(device)
        if upload is None or not upload.receiver.running or upload.receiver.transfer != transfer:
            self.dropped += 1
            self._traffic.received(device, transfer, sum(len(chunk.data) for chunk in chunks), 0)  # it was under way
            return
        receiver, before = upload.receiver, (upload.receiver.received_bytes, upload.receiver.duplicate_bytes)
        for chunk in chunks:
            if self._uploads.get(device) is not upload:
                break  # the update was rejected for one of them
            with self._rejecting(upload):
                self._ended(upload, receiver.on_chunk(chunk, self._clock()))
        first, again = receiver.received_bytes - before[0], receiver.duplicate_bytes - before[1]
        self._traffic.received(device, transfer, first, again)

    def on_tick(self) -> None:
        """Repeat requests of silent uploads; a stalled upload gives way to a waiting one."""
        now = self._clock()
        for device, upload in list(self._uploads.items()):
            if upload.receiving:
                upload.receiver.on_tick(now)
                if upload.receiver.stalls >= 2 and len(self._admitted) < len(self._uploads):
                    upload.receiver.pause()
                    self._admitted.discard(device)
                    self._uploads[device] = self._uploads.pop(device)
                    self._admit()

    def cancel(self, device: str, attempt: Attempt | None = None) -> None:
        """The update (of this attempt) is not wanted. What has arrived stays until garbage is collected."""
        upload = self._uploads.get(device)
        if upload is not None and attempt in {None, upload.update.attempt}:
            self._done(upload)

    def received_bytes(self, device: str, attempt: Attempt) -> int:
        """Bytes so far of the device's update in this attempt."""
        upload = self._uploads.get(device)
        return upload.receiver.received_bytes if upload is not None and upload.update.attempt == attempt else 0

    def arriving(self) -> set[str] | None:
        """Ids of uploaded objects not yet in the ledger, for garbage collection; None during checks of contents."""
        if self._checking is not None:
            return None
        fetched = (upload.update.manifest.values() for upload in self._uploads.values())
        return {ref.id for refs in (*fetched, *self._reported.values()) for ref in refs}

    async def checked(self) -> None:
        """Wait for the checks of contents in progress."""
        while self._checking is not None:
            await asyncio.wait([self._checking])

    def clear(self) -> None:
        """Forget all uploads: every attempt is closed."""
        self._uploads.clear()
        self._admitted.clear()
        self._reported.clear()

    async def close(self) -> None:
        """End all uploads and checks for good."""
        self.clear()
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)  # of checks in progress nothing is reported

    def _admit(self) -> None:
        """Start fetching the longest waiting updates while there is room."""
        while len(self._admitted) < min(MOST_UPLOADS, len(self._uploads)):
            device = next(name for name in self._uploads if name not in self._admitted)
            self._admitted.add(device)
            self._start(self._uploads[device])

    def _start(self, upload: _Upload) -> None:
        upload.began = upload.began or self._clock()
        # Devices that send equal objects send them in equal chunks.
        names = (ref.id for ref in upload.update.manifest.values())
        chunk_bytes = self._store.chunk_size_in_progress(names, self._sizer.of([upload.update.device])[0])
        with self._rejecting(upload):
            end = upload.receiver.start(chunk_bytes, self._sizer.credit(chunk_bytes), self._clock())
            self._ended(upload, end)

    def _ended(self, upload: _Upload, end: End | None) -> None:
        if isinstance(end, Superseded):
            self._start(upload)
        elif isinstance(end, Failed):
            parts = [part for part, ref in upload.update.manifest.items() if ref.id == end.object_id]
            text = f"part {', '.join(parts)[:200]}: {end.reason} of {end.object_id[:12]}"
            self._reject(upload, Refusal(reason="hash", detail=text))
        elif end is not None:
            self._sizer.note(upload.update.device, upload.receiver.received_bytes, self._clock() - upload.began)
            upload.whole = True
            self._waiting.append(upload)
            if self._checking is None:
                self._checking = asyncio.ensure_future(self._check())

    async def _check(self) -> None:
        """Check complete updates; those completed meanwhile are the next batch."""
        try:
            while self._waiting:
                if not self._store.held:
                    await asyncio.sleep(min(MOST_GATHERED_S, UPLOAD_S * len(self._uploads)))
                batch, self._waiting = self._waiting, []
                small = sum(upload.receiver.received_bytes for upload in batch) < _SMALL_BYTES
                if small and self._store.held:  # no disk is waited for
                    verdicts = self._verdicts(batch, map)
                else:
                    verdicts = await asyncio.to_thread(self._verdicts, batch, map if small else self._threads.map)
                for upload, verdict in zip(batch, verdicts, strict=True):
                    self._judged(upload, verdict)
        except Exception as error:  # a disk that refuses the next in line ends the run
            self._report(error)
        finally:
            self._checking = None

    def _verdicts(self, batch: list[_Upload], each: _Map) -> list[_Verdict]:
        """Check updates; make their objects last through a power cut, together."""
        arrived = [arrival for one in batch for arrival in one.receiver.partials.values()]
        if large := [arrival for arrival in arrived if arrival.in_file]:
            self._store.publish(large)
        verdicts = list(each(self._verdict, batch))
        self._store.publish(arrived)  # and what was packed by its device, unpacked
        return verdicts

    def _verdict(self, one: _Upload) -> _Verdict:
        try:
            whole = check_update(self._store, one.update.manifest, one.previous, self._rules, one.own, one.asked)
            return whole if isinstance(whole, Refusal) else (whole, changes_of(self._store, whole, one.previous))
        except Exception as error:  # its own matter: the others' contents may be right
            return error

    def _judged(self, upload: _Upload, found: _Verdict) -> None:
        update = upload.update
        if self._uploads.get(update.device) is not upload:
            return  # cancelled meanwhile
        if isinstance(found, Exception):  # StoreError, or a defect, ends the run
            self._report(found)
            return
        if isinstance(found, Refusal):
            self._reject(upload, found)
            return
        manifest, changes = found
        self._reported[update.device] = (*update.manifest.values(), *manifest.values())
        figures = self._traffic.figures(update.device, update.attempt)
        for part, name in _APART.items():
            if part in update.manifest:
                figures[name] = counted(update.manifest[part].size, "objects of the update")
        self._report(UpdateStored(self._clock(), update.device, update.attempt, figures, manifest, changes))
        self._done(upload)

    def _reject(self, upload: _Upload, refusal: Refusal) -> None:
        self._report(UpdateInvalid(self._clock(), upload.update.device, upload.update.attempt, refusal))
        self._done(upload)

    def _done(self, upload: _Upload) -> None:
        device = upload.update.device
        if self._uploads.get(device) is upload:
            del self._uploads[device]
            self._admitted.discard(device)
            self._admit()

    @contextlib.contextmanager
    def _rejecting(self, upload: _Upload) -> Iterator[None]:
        """Reject the update for a ProtocolError: the device's fault. A StoreError ends the run."""
        try:
            yield
        except ProtocolError as error:
            self._reject(upload, Refusal(reason="update", detail=error.message[:500]))
