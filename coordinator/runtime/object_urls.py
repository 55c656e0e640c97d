"""Signed URLs of objects: an HMAC over method, object, size, device, transfer and expiry."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Literal, NamedTuple
from urllib.parse import parse_qs, urlencode

import msgspec

from edgefl.errors import ProtocolError
from edgefl.protocol.topics import check_name
from edgefl.storage.objects import check_id

Method = Literal["GET", "PUT"]
#: Smaller objects are sent in chunks: what these cost more is less than a request of their own and its answer take.
LEAST_BYTES = 2**20
#: URLs in one message, of the largest objects: at 350 bytes each they leave an offer of 500 parts below its limit.
MOST_URLS = 64
#: A URL is valid for this long at least, and for twice as long at most: no transfer of a round takes longer, and one
#: that does goes on in chunks. It ends with its transfer in any case.
VALID_S = 2 * 3600
#: Longest query that is looked at.
_MOST_CHARACTERS = 1024
_PATH = "/objects/"


class Permit(NamedTuple):
    """Permission of a URL. ``device``: its name at the broker; ``until``: seconds since the epoch."""

    method: Method
    object_id: str
    size: int
    device: str
    transfer: str
    until: int


def urls_of(
    base: str, key: bytes, method: Method, device: str, transfer: str, sizes: Mapping[str, int], now: float
) -> dict[str, str]:
    """Object id -> its URL, of the largest of these objects; the same ones for an hour or two."""
    until = (int(now) // VALID_S + 2) * VALID_S
    large = sorted((name for name, size in sizes.items() if size >= LEAST_BYTES), key=lambda name: -sizes[name])
    permits = (Permit(method, name, sizes[name], device, transfer, until) for name in large[:MOST_URLS])
    return {permit.object_id: f"{base}{_PATH}{permit.object_id}?{_query(key, permit)}" for permit in permits}


def permit_of(key: bytes, method: Method, path: str, query: bytes, now: float) -> Permit:
    """Permission of a request's URL. Raises ProtocolError for one that was not made here, or is over."""
    if not path.startswith(_PATH) or len(query) > _MOST_CHARACTERS:
        raise ProtocolError("there is nothing here")
    try:
        given = {name: values[-1] for name, values in parse_qs(query.decode("ascii"), max_num_fields=8).items()}
        name, device, transfer = check_id(path.removeprefix(_PATH)), given["device"], given["transfer"]
        size, until = int(given["size"]), int(given["until"])
        permit = Permit(method, name, size, check_name("device", device), check_name("transfer", transfer), until)
    except (KeyError, ValueError, ProtocolError) as error:
        raise ProtocolError("this is no signed URL") from error
    if not hmac.compare_digest(_sign(key, permit), given.get("sign", "").encode()):
        raise ProtocolError("this URL is not signed by the coordinator that runs now, or not for this")
    if now >= permit.until:
        raise ProtocolError("this URL has expired")
    return permit


def _query(key: bytes, permit: Permit) -> str:
    named = {"device": permit.device, "transfer": permit.transfer, "size": permit.size, "until": permit.until}
    return urlencode({**named, "sign": _sign(key, permit).decode()})


def _sign(key: bytes, permit: Permit) -> bytes:
    return hmac.new(key, msgspec.json.encode(tuple(permit)), hashlib.sha256).hexdigest().encode()
