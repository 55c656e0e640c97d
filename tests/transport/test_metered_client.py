"""paho's client as it is driven here: packets read ahead, written together, and the thread that writes woken once."""

from __future__ import annotations

import random
from unittest.mock import Mock

import pytest
from paho.mqtt.client import Client
from paho.mqtt.enums import MQTTErrorCode, MQTTProtocolVersion

from edgefl.transport.metered_client import MANY, Meter, MeteredClient

PUBLISH, PUBACK, DISCONNECT = 0x30, 0x40, 0xE0


def made(version: MQTTProtocolVersion = MQTTProtocolVersion.MQTTv5) -> MeteredClient:
    return MeteredClient(Meter(), client_id="a", protocol=version)


def test_what_is_read_ahead_comes_in_order_whatever_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(0).randbytes(200_000)
    asked, given = [], 0

    def receive(_: Client, size: int) -> bytes:
        nonlocal given
        asked.append(size)
        piece = data[given : given + min(size, 50_000)]
        given += len(piece)
        return piece

    monkeypatch.setattr(Client, "_sock_recv", receive)
    client, got = made(), b""
    while len(got) < len(data):
        got += client._sock_recv(random.Random(len(got)).choice([1, 2, 700, 98_000]))
    assert got == data
    assert len(asked) == 4
    assert client._meter.received == len(data)


def queued(client: MeteredClient, *packets: tuple[int, bytes, int]) -> None:
    for command, packet, qos in packets:
        client._packet_queue(command, packet, 1, qos, Mock())


def test_small_packets_are_written_together_but_not_what_paho_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []

    def send(_: Client, data: bytes) -> int:
        written.append(bytes(data))
        return len(data)

    monkeypatch.setattr(Client, "_sock_send", send)
    client = made()
    queued(client, (PUBACK, b"a", 0), (PUBLISH, b"b", 1), (PUBACK, b"c", 0), (PUBLISH, b"d", 0), (PUBACK, b"e", 0))
    assert client._packet_write() == MQTTErrorCode.MQTT_ERR_SUCCESS
    assert written == [b"abc", b"d", b"e"]
    queued(client, (PUBACK, b"f", 0), (DISCONNECT, b"g", 0))
    monkeypatch.setattr(client, "_do_on_disconnect", Mock())
    client._packet_write()
    assert written[3:] == [b"f", b"g"]


def test_what_the_socket_has_not_taken_is_written_first(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bytes] = []

    def send(_: Client, data: bytes) -> int:
        if taken and len(taken[-1]) == 2:
            taken.append(b"")
            raise BlockingIOError
        taken.append(bytes(data[:2]))
        return len(taken[-1])

    monkeypatch.setattr(Client, "_sock_send", send)
    client = made()
    queued(client, (PUBACK, b"abc", 0), (PUBACK, b"de", 0))
    assert client._packet_write() == MQTTErrorCode.MQTT_ERR_AGAIN
    queued(client, (PUBACK, b"fg", 0))
    while client._packet_write() == MQTTErrorCode.MQTT_ERR_AGAIN:
        pass
    assert b"".join(taken) == b"abcdefg"


def test_the_thread_that_writes_is_woken_once_and_only_while_it_waits() -> None:
    client = made()
    client._sockpairW = woken = Mock()
    queued(client, (PUBACK, b"a", 0))
    assert not woken.send.called
    client._waits = True
    queued(client, (PUBACK, b"b", 0), (PUBACK, b"c", 0))
    assert woken.send.call_count == 1


@pytest.mark.parametrize("version", [MQTTProtocolVersion.MQTTv311, MQTTProtocolVersion.MQTTv5])
def test_a_message_without_properties_is_handed_over_at_once(version: MQTTProtocolVersion) -> None:
    client, plain, whole = made(version), Mock(), Mock()
    client.on_plain, client.on_message = plain, whole
    none = b"\x00" if version == MQTTProtocolVersion.MQTTv5 else b""
    for payload in (b"payload", b""):
        client._in_packet |= {"command": PUBLISH | 2, "packet": bytearray(b"\x00\x03a/b\x01\x02" + none + payload)}
        assert client._handle_publish() == MQTTErrorCode.MQTT_ERR_SUCCESS
        plain.assert_called_with(b"a/b", payload)
    assert not whole.called
    assert [one["packet"][:4] for one in client._out_packet] == [b"\x40\x02\x01\x02"] * 2
    client._in_packet |= {"command": PUBLISH, "packet": bytearray(b"\x00\x03a/b" + none + b"of QoS 0")}
    client._handle_publish()
    assert whole.call_args[0][2].payload == b"of QoS 0"
    if version == MQTTProtocolVersion.MQTTv5:
        body = b"\x00\x03a/b\x01\x02\x05\x08\x00\x02re" + b"with a response topic"
        client._in_packet |= {"command": PUBLISH | 2, "packet": bytearray(body)}
        client._handle_publish()
        assert whole.call_args[0][2].properties.ResponseTopic == "re"
    assert plain.call_count == 2


@pytest.mark.parametrize("version", [MQTTProtocolVersion.MQTTv311, MQTTProtocolVersion.MQTTv5])
def test_a_truncated_message_is_pahos_to_refuse(version: MQTTProtocolVersion) -> None:
    client = made(version)
    client.on_plain = Mock()
    for packet in (b"", b"\x00", b"\x00\x09a", b"\x00\x01a\x01"):
        client._in_packet |= {"command": PUBLISH | 2, "packet": bytearray(packet)}
        with pytest.raises(Exception):  # noqa: B017, PT011 - whichever paho raises, which its own reader catches
            client._handle_publish()
    assert not client.on_plain.called


def test_pauses_come_with_many_messages_only() -> None:
    client = made()
    assert not client._is_busy(10.0)
    client._messages = MANY - 1
    assert not client._is_busy(10.2)
    client._messages = MANY
    assert not client._is_busy(10.25)  # it is not looked yet
    assert client._is_busy(10.4)
    assert not client._is_busy(10.6)


def test_a_flood_of_messages_does_not_hold_up_what_waits_to_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    message = bytes([PUBLISH, 0x80 | 0x6E, 0x07]) + b"\x00\x03a/b" + bytes(1 + 1000)  # of QoS 0
    written, asked = [], 0

    def receive(_: Client, size: int) -> bytes:
        nonlocal asked
        asked += 1
        assert asked < 1000, "the flood does not end"
        begin = (asked - 1) * 65_536 % len(message)
        return (message * 80)[begin : begin + 65_536]

    def send(_: Client, data: bytes) -> int:
        written.append(bytes(data))
        return len(data)

    monkeypatch.setattr(Client, "_sock_recv", receive)
    monkeypatch.setattr(Client, "_sock_send", send)
    monkeypatch.setattr(MeteredClient, "_step", lambda client, timeout: client.loop_read())
    client = made()
    client._sock, client.on_message = Mock(), Mock()
    queued(client, (PUBACK, b"a", 0))
    assert client._loop() == MQTTErrorCode.MQTT_ERR_SUCCESS
    assert written == [b"a"]
    assert client.on_message.call_count > 1000
    assert client._ahead  # which the next turn takes at once
