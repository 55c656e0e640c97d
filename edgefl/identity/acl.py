"""Access control of topics: one table of rules, and the brokers' ACL files made from it.

``%u`` stands for the user name, which is the common name of the client's certificate; ``%c`` for the client id, all
that a device without a certificate has. A broker must deny everything else.

The first machine of a name has the name for its user; the second of ``cam`` is ``cam~2``, which no name can be. So a
broker tells a replaced machine from its successor, also on a connection that is open, whatever client id it uses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from edgefl.protocol import topics

Who = Literal["device", "coordinator", "newcomer"]
May = Literal["write", "read"]
_USER, _CLIENT, _ANY = "%u", "%c", "+"
_NOBODY: Mapping[str, str] = MappingProxyType({})


class Rule(NamedTuple):
    """Permission of ``who`` on a topic. A newcomer has no certificate yet and uses a listener of its own."""

    who: Who
    may: May
    topic: str


def user_of(device: str, generation: int) -> str:
    """User name at the broker of a device's ``generation``-th machine, from 1."""
    return device if generation == 1 else f"{device}~{generation}"


def rules(fleet: str) -> list[Rule]:
    """All permissions of a fleet. Raises ProtocolError for a fleet name that is no topic level."""
    topics.check_name("fleet", fleet)
    return [
        Rule("device", "write", topics.build("up", fleet, _USER)),
        Rule("device", "write", topics.build("up-object", fleet, _USER, _ANY)),
        Rule("device", "write", topics.build("presence", fleet, _USER)),
        Rule("device", "write", topics.build("probe", fleet, _USER)),
        Rule("device", "read", topics.build("probe", fleet, _USER)),
        Rule("device", "read", topics.build("down", fleet, _USER)),
        Rule("device", "read", topics.build("down-object", fleet, _USER, _ANY)),
        Rule("device", "read", topics.build("shared-object", fleet, transfer=_ANY)),
        Rule("coordinator", "read", topics.build("up", fleet, _ANY)),
        Rule("coordinator", "read", topics.build("up-object", fleet, _ANY, _ANY)),
        Rule("coordinator", "read", topics.build("presence", fleet, _ANY)),
        Rule("coordinator", "write", topics.build("probe", fleet, topics.COORDINATOR)),
        Rule("coordinator", "read", topics.build("probe", fleet, topics.COORDINATOR)),
        Rule("coordinator", "write", topics.build("down", fleet, _ANY)),
        Rule("coordinator", "write", topics.build("down-object", fleet, _ANY, _ANY)),
        Rule("coordinator", "write", topics.build("shared-object", fleet, transfer=_ANY)),
        Rule("coordinator", "read", topics.build("enroll-up", fleet, _ANY)),
        Rule("coordinator", "write", topics.build("enroll-down", fleet, _ANY)),
        Rule("newcomer", "write", topics.build("enroll-up", fleet, _CLIENT)),
        Rule("newcomer", "read", topics.build("enroll-down", fleet, _CLIENT)),
    ]


def mosquitto_acl(fleet: str, revoked: Collection[str] = (), successors: Mapping[str, str] = _NOBODY) -> str:
    """The acl_file of mosquitto's listener for clients with certificates.

    ``revoked`` users lose every topic as soon as the file is read again, also on a connection that is open.
    ``successors``: user -> the device whose later machine it is.
    """
    lines = [f"user {topics.COORDINATOR}"]
    lines += [f"topic {rule.may} {rule.topic}" for rule in rules(fleet) if rule.who == "coordinator"]
    for name in sorted(revoked):
        lines += ["", f"user {name}", "topic deny #"]
    for user, device in sorted(successors.items()):
        own = [rule for rule in rules(fleet) if rule.who == "device"]
        lines += ["", f"user {user}", *(f"topic {rule.may} {rule.topic.replace(_USER, device)}" for rule in own)]
    lines += ["", *(f"pattern {rule.may} {rule.topic}" for rule in rules(fleet) if rule.who == "device")]
    return "\n".join(lines) + "\n"


def mosquitto_enroll_acl(fleet: str) -> str:
    """The acl_file of a mosquitto for newcomers alone, where the coordinator is a user with a password."""
    enrolment = {topics.build("enroll-up", fleet, _ANY), topics.build("enroll-down", fleet, _ANY)}
    own = [rule for rule in rules(fleet) if rule.who == "coordinator" and rule.topic in enrolment]
    lines = [f"user {topics.COORDINATOR}", *(f"topic {rule.may} {rule.topic}" for rule in own)]
    lines += ["", *(f"pattern {rule.may} {rule.topic}" for rule in rules(fleet) if rule.who == "newcomer")]
    return "\n".join(lines) + "\n"


def emqx_acl(fleet: str, revoked: Collection[str] = (), successors: Mapping[str, str] = _NOBODY) -> str:
    """EMQX's acl.conf for clients with certificates: the first rule that matches counts, the last one denies the rest.

    Newcomers are left out: rules do not distinguish EMQX's listeners, where a client without a certificate may use any
    name.
    """
    lines = [f'{{deny, {{username, "{name}"}}, all, ["#"]}}.' for name in sorted(revoked)]
    for rule in (one for one in rules(fleet) if one.who != "newcomer"):
        action = "publish" if rule.may == "write" else "subscribe"
        of_all = [(f'{{username, "{topics.COORDINATOR}"}}' if rule.who == "coordinator" else "all", "${username}")]
        later = [(f'{{username, "{user}"}}', device) for user, device in sorted(successors.items())]
        for who, name in of_all + (later if rule.who == "device" else []):
            lines.append(f'{{allow, {who}, {action}, ["{rule.topic.replace(_USER, name)}"]}}.')
    return "\n".join([*lines, "{deny, all}."]) + "\n"
