"""Transfers at their edges: limits by hand, what is counted, and what a message out of its time does."""

from __future__ import annotations

import pytest
from test_transfer import CHUNK, Counting, bitmap, everything, name, need, refs, sizes

from edgefl.protocol.messages import Need
from edgefl.records import ObjectRef
from edgefl.transfer.receiver import SLOW_LINK, STEP_BITS, Completed, Receiver, SendChunk
from edgefl.transfer.sender import MAX_INCARNATIONS, PACE_STALL_S, Epochs, ReceiverState, Sender

ALL = {"missing": {name(0): b"\x07"}}


@pytest.mark.parametrize("field", ["credit", "received", "epoch"])
def test_each_number_of_a_need_has_its_bound(field: str) -> None:
    least = {"credit": 1, "received": 0, "epoch": 0}
    sender = Counting("t", sizes(refs(3)))
    assert sender.on_need("a", need(**{**ALL, **least, field: least[field] - 1}), 0.0) == []
    assert sender.dropped == {"malformed": 1}
    assert sender.on_need("a", need(**{**ALL, **least}), 0.0) == [SendChunk("a", name(0), 0)]


def test_what_is_dropped_twice_is_counted_twice() -> None:
    sender = Counting("t", sizes(refs(3)))
    sender.on_need("a", need(epoch=5, **ALL), 0.0)
    for message in (
        need(epoch=6, missing={name(0): b"\x08"}),
        need(epoch=6, missing={name(0): b"\x00"}),
        need(epoch=6, received=1),
        need(epoch=5),
    ):
        for _ in range(2):
            assert sender.on_need("a", message, 0.0) == []
    assert sender.dropped == {"unfit_bitmap": 4, "unknown_epoch": 2, "stale_progress": 2}


def test_a_receiver_counts_each_chunk_that_it_ignores() -> None:
    receiver = Receiver("t", "a", refs(1, 2), CHUNK, 4, incarnation=7)
    assert not receiver.finished
    receiver.start(everything(refs(1, 2)), 0.0)
    receiver.on_chunk(name(0), 0, CHUNK - 3, 0.0)
    for _ in range(2):
        for chunk in ((name(0), 0, CHUNK - 3), (name(5), 0, CHUNK), (name(1), 2, CHUNK), (name(1), 0, 3)):
            receiver.on_chunk(*chunk, 0.0)
        receiver.on_verified(name(1), True, 0.0)
    reasons = ("duplicate", "unknown_object", "index_out_of_range", "wrong_size", "unexpected_verdict")
    assert receiver.dropped == dict.fromkeys(reasons, 2)
    assert receiver.duplicate_bytes == 2 * (CHUNK - 3)
    receiver.on_chunk(name(1), 0, CHUNK, 0.0)
    receiver.on_chunk(name(1), 1, CHUNK - 3, 0.0)
    receiver.on_verified(name(0), True, 0.0)
    receiver.on_verified(name(1), True, 0.0)
    for _ in range(2):
        receiver.on_chunk(name(0), 0, CHUNK - 3, 0.5)
    assert receiver.dropped["finished"] == 2
    assert receiver.duplicate_bytes == 4 * (CHUNK - 3)


def test_a_receiver_that_only_verifies_asks_for_nothing() -> None:
    receiver = Receiver("t", "a", refs(1), CHUNK, 4, incarnation=7)
    receiver.start(everything(refs(1)), 0.0)
    receiver.on_chunk(name(0), 0, CHUNK - 3, 0.0)
    assert receiver.on_stall(1.0) == []
    assert receiver.on_tick(100.0) == []


def test_the_pace_that_was_learned_is_halved_by_each_faster_chunk() -> None:
    """A chunk after 24 s, the next at once: 12 s between chunks are expected, and twice that is waited."""
    receiver = Receiver("t", "a", refs(4), CHUNK, 9, incarnation=7)
    receiver.start(everything(refs(4)), 0.0)
    receiver.on_chunk(name(0), 0, CHUNK, 24.0)
    receiver.on_chunk(name(0), 1, CHUNK, 24.0)
    assert receiver.on_tick(24.0 + 23.9) == []
    assert len(receiver.on_tick(24.0 + 24.0)) == 1


def test_a_large_chunk_over_a_slow_link_is_given_one_and_a_half_times_its_time() -> None:
    size = 6 * SLOW_LINK  # 6 s, so 9 s
    receiver = Receiver("t", "a", [ObjectRef(name(0), size)], size, 4, incarnation=7)
    receiver.start({name(0): b"\x01"}, 0.0)
    assert receiver.on_tick(8.9) == []
    assert len(receiver.on_tick(9.0)) == 1


def test_a_probe_waits_one_and_a_half_times_what_a_slow_link_takes() -> None:
    size = 4 * SLOW_LINK  # three of them take 12 s, so 18 s
    sender = Sender("t", {name(0): 3 * size})
    asked = {"chunk_bytes": size, "credit": 3, "missing": {name(0): b"\x07"}}
    assert len(sender.on_need("a", need(**asked), 0.0)) == 3
    assert sender.on_tick(17.9) == []
    assert len(sender.on_tick(18.0)) == 1


def test_a_probe_waits_twice_what_those_in_flight_take_at_the_pace_so_far() -> None:
    size = 4 * SLOW_LINK
    sender = Sender("t", {name(0): 4 * size})
    sender.on_need("a", need(chunk_bytes=size, credit=9, missing={name(0): b"\x0f"}), 0.0)
    sender.on_need("a", need(chunk_bytes=size, credit=9, received=1), 2.0)
    # 2 s a chunk and three in flight: 12 s, not the 18 s of a slow link
    assert sender.on_tick(13.9) == []
    assert len(sender.on_tick(14.0)) == 1


def test_a_done_ends_the_epochs_before_it_too() -> None:
    sender = Counting("t", sizes(refs(3)))
    sender.on_need("a", need(epoch=5, done=True), 0.0)
    assert sender.on_need("a", need(epoch=4, **ALL), 0.0) == []
    assert sender.dropped == {"stale_epoch": 1}
    assert sender.on_need("b", need("b", epoch=4, **ALL), 0.0), "another device's epochs are its own"


def test_the_last_sixty_four_incarnations_of_a_device_are_remembered() -> None:
    epochs = Epochs()
    for incarnation in range(MAX_INCARNATIONS):
        epochs.enter("a", incarnation << STEP_BITS | 5)
    assert epochs.age("a", 0 << STEP_BITS | 5) == "replaced"
    epochs.enter("a", MAX_INCARNATIONS << STEP_BITS)
    assert epochs.age("a", 0 << STEP_BITS | 5) == "new", "the first is forgotten"
    ages = [epochs.age("a", 1 << STEP_BITS | step) for step in (4, 5, 6)]
    assert ages == ["stale", "replaced", "new"]
    assert epochs.age("a", MAX_INCARNATIONS << STEP_BITS) == "present"


def test_another_chunk_size_forgets_what_was_under_way() -> None:
    """Also where it then asks for what does not fit: chunk numbers of the earlier size mean other chunks now."""
    sender = Counting("t", sizes(refs(3)))
    sender.on_need("a", need(epoch=1, **ALL), 0.0)
    assert sender.on_need("a", need(epoch=2, chunk_bytes=5, missing={name(0): b"\x07\x07"}), 0.0) == []
    assert sender.chunk_bytes == 5
    assert sender.on_need("a", need(epoch=1, chunk_bytes=5, received=1), 0.0) == []
    assert sender.dropped == {"unfit_bitmap": 1, "unknown_epoch": 1}
    assert sender.on_tick(100.0) == []


@pytest.mark.parametrize(("credit", "after"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3)])
def test_a_receiver_acknowledges_each_half_window_rounded_down(credit: int, after: int) -> None:
    receiver = Receiver("t", "a", refs(9), CHUNK, credit, incarnation=7)
    receiver.start(everything(refs(9)), 0.0)
    said = [receiver.on_chunk(name(0), index, CHUNK, 0.0) for index in range(8)]
    told = [one.received for out in said for one in out if isinstance(one, Need)]
    assert told == list(range(after, 9, after))


def test_half_a_window_is_at_least_one_chunk() -> None:
    receiver = ReceiverState(credit=1, todo=0, heard=0.0, since=0.0, in_step=True, sent=5, blocked_at=1.0)
    receiver.acknowledge(0, 2.0)
    assert receiver.blocked_at == 1.0
    receiver.acknowledge(1, 2.0)
    assert receiver.blocked_at is None


def test_one_with_a_full_window_of_its_own_chunks_holds_nobody_up() -> None:
    objects = refs(40, 4)
    sender = Counting("t", sizes(objects), ["a", "b", "c"])
    for device in ("a", "b"):
        sender.on_need(device, need(device, missing={name(0): bitmap(40)}), 0.0)
    sender.on_need("c", need("c", credit=1, missing={name(1): bitmap(4)}), 0.0)
    for tenths in range(1, 10 * int(PACE_STALL_S) + 10):
        for device in ("a", "b"):
            sender.on_need(device, need(device, received=tenths), tenths / 10)
        sender.on_tick(tenths / 10)
    assert sender.in_step == {"a", "b", "c"}


def test_one_that_was_dropped_is_sent_nothing_until_it_asks_again() -> None:
    sender = Counting("t", sizes(refs(3)))
    sender.on_need("a", need(epoch=1, **ALL), 0.0)
    assert sender.drop("a", 0.1) == []
    assert sender.active == set()
    assert sender.on_need("a", need(epoch=1, received=1), 0.2) == []
    assert len(sender.on_need("a", need(epoch=2, **ALL), 0.3)) == 2


def test_a_shared_chunk_takes_the_window_of_those_that_lack_it_alone() -> None:
    sender = Counting("t", sizes(refs(2)), ["a", "b", "c"])
    for device in ("a", "c"):
        assert sender.on_need(device, need(device, missing={name(0): b"\x03"}), 0.0) == []
    sent = sender.on_need("b", need("b", credit=1, missing={name(0): b"\x02"}), 0.0)
    assert sent == [SendChunk(None, name(0), 0), SendChunk(None, name(0), 1)]


def test_a_receiver_that_lacks_nothing_is_done_at_once_with_no_chunk_received() -> None:
    receiver = Receiver("t", "a", refs(1), CHUNK, 4, incarnation=7)
    (done, completed) = receiver.start({}, 0.0)
    assert (done.received, done.done, done.missing) == (0, True, {})
    assert completed == Completed("a")
