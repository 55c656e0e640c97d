"""One-time tokens that a fleet has issued: for one device, or for many at once."""

from __future__ import annotations

import contextlib
import csv
import logging
import secrets
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from edgefl.errors import ConfigError, EdgeFLError, IdentityError, Problem, StoreError, some_of
from edgefl.identity import token as t
from edgefl.identity.fleet import Devices, Fleet, id_of, names_of
from edgefl.identity.keys import make_private_directory, read_private, write_private
from edgefl.protocol.topics import COORDINATOR, check_name
from edgefl.storage.disk import store_errors

_LOG = logging.getLogger(__name__)
#: A token is used within a day of being printed, or printed again.
TOKEN_LIFE_S = 86400.0
#: Faults of a list that are shown; the others are counted.
MOST_NAMED = 8
#: How long spent tokens are kept, so that a later use is refused with its reason.
REMEMBERED_S = 7 * 86400.0
#: Longest name of a device that is replaced, and machines of a name: "~999" and it are a common name's 64 characters.
LONGEST_REPLACED, MOST_MACHINES = 60, 999


#: Line, name and groups of a device in a list.
Listed = tuple[int, str, list[str]]


class Issued(msgspec.Struct, frozen=True):
    """Record of an issued token: enough to recognise it, not enough to print it again.

    ``holder``: fingerprint of the device's key that ``answer`` was given to. ``replaces``: number of the machine whose
    place is taken; 0: a new device's token.
    """

    name: str = ""
    key: bytes = b""
    expires: float = 0.0
    holder: str = ""
    answer: t.Answer | None = None
    replaces: int = 0


def issue_token(fleet: Fleet, name: str, now: float, life_s: float = TOKEN_LIFE_S, *, replace: bool = False) -> str:
    """A token for a device; an earlier unused one of its name ends. Raises IdentityError.

    ``replace``: another machine takes the name over from the one that has it, which goes on until then.
    """
    with fleet.changing() as devices:
        name = id_of(devices, name) if replace else name
        check_issuable(fleet, devices, name, replace=replace)
        return _issue(fleet, devices, [name], now, life_s, replace=replace)[0]


def issue_tokens(
    fleet: Fleet, file: Path, out: Path, now: float, life_s: float = TOKEN_LIFE_S, *, replace: bool = False
) -> list[Path]:
    """Write a token for each name in a list, as ``out``/NAME.token.

    Nothing is written unless all names are right. Raises ConfigError with the line of every name at fault, StoreError.
    """
    listed = list(_listed(file))
    with fleet.changing() as devices:
        if replace:
            listed = [(line, id_of(devices, name), groups) for line, name, groups in listed]
        if problems := list(_faults(fleet, devices, listed, out, replace=replace)):
            remedy = (
                "No token was made. Mend these lines, or name another --out; for machines of names in use, give a list "
                "with --replace."
            )
            raise ConfigError(str(file), problems, remedy=remedy, most=MOST_NAMED)
        if not out.is_dir():
            make_private_directory(out)
        names = [name for _, name, _ in listed]
        texts = _issue(fleet, devices, names, now, life_s, replace=replace)
        if any(groups for _, _, groups in listed):
            known = fleet.groups()
            for _, name, groups in listed:
                shown = devices[name].shown or name if name in devices else name
                known |= {group: (*known.get(group, ()), shown) for group in groups}
            fleet.write_groups(known)
    files = [_token_file(out, name) for name in names]
    try:
        for path, text in zip(files, texts, strict=True):
            write_private(path, f"{text}\n".encode())
    except StoreError:
        for path in files:  # the same command makes them all again; tokens without a file end then
            path.unlink(missing_ok=True)
        raise
    return files


def _faults(fleet: Fleet, devices: Devices, listed: Sequence[Listed], out: Path, *, replace: bool) -> Iterator[Problem]:
    seen = dict[str, int]()
    for line, name, groups in listed:
        try:
            check_issuable(fleet, devices, name, replace=replace)
            for group in groups:
                check_name("group", group)
            if name in seen:
                raise IdentityError(f"{name!r} is on line {seen[name]} already")
            if _token_file(out, name).exists():
                raise StoreError(f"{_token_file(out, name)} is there already")
        except EdgeFLError as error:
            yield Problem("name", error.message, line)
        seen.setdefault(name, line)
    if not listed:
        yield Problem("name", "the list has no name: write one on each line")


def _token_file(out: Path, name: str) -> Path:
    return out / f"{name}.token"


def _listed(file: Path) -> Iterator[Listed]:
    """Line number, name (first column) and groups of each line; without empty lines, comments and a header ``name``.

    Groups are in the column that the header calls ``groups``, one beside the other by spaces or semicolons.
    """
    with store_errors("read", file):
        text = file.read_text(encoding="utf-8-sig", errors="replace")
    rows, line, column, first = csv.reader(text.splitlines()), 1, -1, True
    try:
        for row in rows:
            name = row[0].strip() if row else ""
            told = bool(name) and not name.startswith("#")
            if told and first and name.lower() == "name":
                column = next((i for i, head in enumerate(row) if head.strip().lower() == "groups"), -1)
            elif told:
                yield line, name, row[column].replace(";", " ").split() if 0 < column < len(row) else []
            first = first and not told
            line = rows.line_num + 1  # a quoted field may have several lines
    except csv.Error as error:
        raise ConfigError(
            str(file), [Problem("name", str(error), line)], remedy="Write one name on each line."
        ) from error


def _issue(
    fleet: Fleet, devices: Devices, names: Sequence[str], now: float, life_s: float, *, replace: bool
) -> list[str]:
    """Tokens for names that were checked; unused earlier ones of the names end."""
    end_tokens(fleet, names, now)
    texts = []
    for name in names:
        secret = secrets.token_bytes(t.SECRET_BYTES)
        issued = Issued(name, t.proof_key(secret), now + life_s, replaces=devices[name].generation if replace else 0)
        write_private(path_of(fleet, t.client_id(secret)), msgspec.msgpack.encode(issued))
        token = t.Token(1, fleet.record.fleet, name, fleet.enroll_url, secret, fleet.authority_der)
        texts.append(t.encode_token(token))
    return texts


def end_tokens(fleet: Fleet, names: Collection[str], now: float) -> None:
    """End the names' unused tokens, and delete long expired ones. Raises StoreError."""
    for path in sorted((fleet.directory / "tokens").glob("enroll-*")):
        try:
            known = issued_in(path)
        except IdentityError as error:  # one token's matter: the others' devices enrol
            _LOG.warning("%s %s", error.message, error.remedy)
            continue
        if known.expires + REMEMBERED_S < now or (known.name in names and known.answer is None):
            with store_errors("delete", path):
                path.unlink(missing_ok=True)


def awaited(fleet: Fleet) -> dict[str, float]:
    """Name that an unused token is for -> when that ends. A damaged record of one is left out."""
    names = dict[str, float]()
    for path in (fleet.directory / "tokens").glob("enroll-*"):
        with contextlib.suppress(IdentityError):
            issued = issued_in(path)
            names |= {issued.name: issued.expires} if issued.answer is None else {}
    return names


def is_expected(fleet: Fleet, client: str) -> bool:
    """Whether a token with this client id is out: a cheap look before anything is decoded."""
    return path_of(fleet, client).is_file()


def check_issuable(fleet: Fleet, devices: Devices, name: str, *, replace: bool = False) -> None:
    """Raises IdentityError or ProtocolError for a name that no token can be for."""
    check_name("device", name)
    if name == COORDINATOR:
        raise IdentityError(f"no device can be called {name!r}", remedy="Choose another name.")
    if not replace:
        check_free(devices, name)
        return
    if name not in devices:
        there = some_of(sorted(fleet.shown(devices).values()))
        remedy = f"Leave --replace away for a new device. Enrolled are: {there}."
        raise IdentityError(f"no device {name!r} is enrolled", remedy=remedy)
    if len(name) > LONGEST_REPLACED or devices[name].generation >= MOST_MACHINES:
        text = (
            f"{name}, {len(name)} characters and machine {devices[name].generation}, cannot be taken over: "
            f"{LONGEST_REPLACED} characters and {MOST_MACHINES} machines are the most"
        )
        raise IdentityError(text, remedy="Enrol the machine under another name.")
    if fleet.record.broker and not fleet.record.reload:
        text = f"the broker at {fleet.record.broker} has to read its files when a machine is replaced"
        remedy = f'Write a command that makes it do so into "reload" of {fleet.directory / "fleet.json"}, as init does.'
        raise IdentityError(text, remedy=remedy)


def check_free(devices: Devices, name: str) -> None:
    """Raise IdentityError for a name in use: two devices with certificates of one name are indistinguishable."""
    if name in devices:
        state = "was revoked" if devices[name].revoked_at is not None else "is enrolled already"
        raise IdentityError(f"a device {name!r} {state}", remedy="Another machine takes its place by --replace.")
    if name in names_of(devices):
        raise IdentityError(f"{name!r} is or was a device's shown name", remedy="Choose another name.")


def path_of(fleet: Fleet, client: str) -> Path:
    """The file with the record of the token that has this client id."""
    return fleet.directory / "tokens" / check_name("client", client)


def issued_in(path: Path) -> Issued:
    """The record of a token. Raises IdentityError, naming the file, when that is damaged or open to others."""
    try:
        return msgspec.msgpack.decode(read_private(path), type=Issued)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        remedy = "Delete it, and give the device another token with `edgefl-coordinator enroll`."
        raise IdentityError(f"{path} is damaged: it is no record of a token ({error})", remedy=remedy) from error
