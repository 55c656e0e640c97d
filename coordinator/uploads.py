"""Updates on their way from the devices: admitted through a gate, resumed from disk, checked before they count."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast

from coordinator.checking import LIMITS, check_update
from coordinator.pace import Pace
from coordinator.values import Received, Spoiled
from edgefl.errors import ProtocolError
from edgefl.objects import ObjectStore
from edgefl.partials import PartialObject
from edgefl.plan.values import Transfer as Packings
from edgefl.protocol.chunks import Chunk, decode_chunk
from edgefl.protocol.messages import Grant, Update
from edgefl.protocol.transfer import (
    Completed,
    Failed,
    Instruction,
    Receiver,
    SendNeed,
    StoreChunk,
    UploadGate,
    VerifyObject,
)
from edgefl.records import Attempt, Figure, Figures, Manifest, ObjectRef, Refusal


@dataclass
class _Upload:
    update: Update
    transfer: str
    previous: Manifest  # the parts as the device was offered them
    receiver: Receiver | None = None  # None: waits at the gate
    partials: dict[str, PartialObject] = field(default_factory=dict)
    payload_bytes: int = 0
    began: float = 0.0  # when its first chunk came
    task: asyncio.Task[None] | None = None  # the check of the contents


class Uploads:
    """Fetches updates.

    ``pace``: how large chunks are; ``signature``: what the run's clusters are made of; ``rules``: how parts may be
    packed; ``grant`` sends a message to a device; ``down`` tells what it was sent; ``report`` takes Received and
    Spoiled, and exceptions that end the run.
    """

    def __init__(
        self,
        store: ObjectStore,
        pace: Pace,
        *,
        signature: str = "",
        rules: Packings | None = None,
        clock: Callable[[], float],
        grant: Callable[[str, Grant], None],
        down: Callable[[Update], Figures],
        report: Callable[[Received | Spoiled | BaseException], None],
    ) -> None:
        self._store = store
        self._pace = pace
        self._signature = signature
        self._transfer = rules
        self._clock = clock
        self._grant = grant
        self._down = down
        self._report = report
        self._gate = UploadGate()
        self._uploads: dict[str, _Upload] = {}
        self._told: dict[str, tuple[ObjectRef, ...]] = {}  # of each device's last update that was reported
        self.dropped = 0  # chunks of no upload

    def fetch(self, update: Update, previous: Manifest, transfer: str) -> None:
        """Fetch an update to the parts ``previous``, as the device was offered them; asked again, go on."""
        device = update.device
        known = self._uploads.get(device)
        if known is not None and (known.update.attempt, known.update.manifest) == (update.attempt, update.manifest):
            if known.receiver is not None and known.task is None:
                self._perform(device, known.receiver.on_stall(self._clock()))
            return
        self.cancel(device)
        self._uploads[device] = _Upload(update, transfer, previous)
        with self._spoiling(device):
            if (refusal := LIMITS.check_sizes(update.manifest, previous, self._transfer)) is not None:
                self._spoil(device, refusal)
                return
            self._start(self._gate.request(device))

    def on_chunk(self, device: str, transfer: str, payload: bytes) -> None:
        """A chunk came on a device's topic."""
        upload = self._uploads.get(device)
        if upload is None or upload.receiver is None or upload.transfer != transfer or upload.task is not None:
            self.dropped += 1
            return
        try:
            chunk = decode_chunk(payload)
        except ProtocolError:
            upload.receiver.dropped["malformed"] += 1
            return
        instructions = upload.receiver.on_chunk(chunk.object_id, chunk.index, len(chunk.data), self._clock())
        self._perform(device, instructions, chunk)

    def on_tick(self) -> None:
        """Ask again where nothing comes; let others pass an upload that stalls."""
        now = self._clock()
        for device, upload in list(self._uploads.items()):
            if upload.receiver is not None and upload.task is None:
                self._perform(device, upload.receiver.on_tick(now))
                if upload.receiver.stalls >= 2 and (others := self._gate.rotate(device)):
                    upload.receiver = None
                    self._start(others)

    def cancel(self, device: str) -> None:
        """The update is no longer wanted. What has arrived stays on disk until the store is tidied."""
        upload = self._uploads.pop(device, None)
        if upload is not None:
            if upload.task is not None:
                upload.task.cancel()
            self._start(self._gate.release(device))

    def arriving(self) -> set[str] | None:
        """Objects the ledger may not know of yet; None while contents are checked, which may make more of them."""
        if any(upload.task is not None for upload in self._uploads.values()):
            return None
        refs = [ref for upload in self._uploads.values() for ref in upload.update.manifest.values()]
        return {ref.id for ref in [*refs, *(ref for told in self._told.values() for ref in told)]}

    def clear(self) -> None:
        """The attempt is closed."""
        self._gate = UploadGate(self._gate.limit)
        self._told.clear()
        for device in list(self._uploads):
            self.cancel(device)

    def _start(self, devices: Iterable[str]) -> None:
        for device in devices:
            upload = self._uploads[device]
            refs = list({ref.id: ref for ref in upload.update.manifest.values()}.values())
            chunk_bytes, credit = self._pace.of([device])
            with self._spoiling(device):
                upload.partials = {
                    ref.id: self._store.partial(ref, chunk_bytes) for ref in refs if not self._store.has(ref.id)
                }
                upload.receiver = Receiver(
                    upload.transfer,
                    device,
                    refs,
                    chunk_bytes,
                    credit,
                    life=secrets.randbelow(2**31),
                    message=Grant,
                )
                missing = {name: partial.missing() for name, partial in upload.partials.items()}
                self._perform(device, upload.receiver.start(missing, self._clock()))

    def _perform(self, device: str, instructions: Iterable[Instruction], chunk: Chunk | None = None) -> None:
        upload = self._uploads.get(device)
        if upload is None or upload.receiver is None:
            return
        with self._spoiling(device):
            for instruction in instructions:
                if isinstance(instruction, StoreChunk) and chunk is not None:
                    upload.partials[instruction.object_id].write(instruction.index, chunk.data)
                    upload.payload_bytes += len(chunk.data)
                    upload.began = upload.began or self._clock()
                elif isinstance(instruction, VerifyObject):
                    ok = upload.partials[instruction.object_id].verify()
                    self._perform(device, upload.receiver.on_verified(instruction.object_id, ok, self._clock()))
                elif isinstance(instruction, SendNeed):
                    self._grant(device, cast("Grant", instruction.need))
                elif isinstance(instruction, Completed) and upload.task is None:
                    self._pace.note(device, upload.payload_bytes, self._clock() - upload.began)
                    upload.task = asyncio.ensure_future(self._check(device, upload))
                elif isinstance(instruction, Failed):
                    parts = [p for p, ref in upload.update.manifest.items() if ref.id == instruction.object_id]
                    text = f"part {', '.join(parts)[:200]}: {instruction.reason} of {instruction.object_id[:12]}"
                    self._spoil(device, Refusal(reason="hash", detail=text))

    async def _check(self, device: str, upload: _Upload) -> None:
        update = upload.update
        try:
            await asyncio.to_thread(self._store.publish, upload.partials.values())
            found = await asyncio.to_thread(
                check_update, self._store, update.manifest, upload.previous, self._signature, self._transfer
            )
        except Exception as error:  # StoreError, or a defect: the runner must hear of it
            self._report(error)
            return
        if isinstance(found, Refusal):
            self._spoil(device, found)
            return
        self._told[device] = (*update.manifest.values(), *found.values())
        figures = {
            "payload_up_bytes": Figure(float(upload.payload_bytes), "counted", "chunks the coordinator received"),
            **self._down(update),
        }
        self._done(device)
        self._report(Received(self._clock(), device, update.attempt, figures, found))

    def _spoil(self, device: str, refusal: Refusal) -> None:
        upload = self._uploads.get(device)
        attempt = upload.update.attempt if upload is not None else Attempt()
        self._done(device)
        self._report(Spoiled(self._clock(), device, attempt, refusal))

    def _done(self, device: str) -> None:
        upload = self._uploads.pop(device, None)
        if upload is not None:
            self._start(self._gate.release(device))

    @contextlib.contextmanager
    def _spoiling(self, device: str) -> Iterator[None]:
        """What a device sent wrongly spoils its update; what the disk refuses ends the run."""
        try:
            yield
        except ProtocolError as error:
            self._spoil(device, Refusal(reason="update", detail=error.message[:500]))
