"""Everything that can be wrong with a device's set-up: a stable id each, what it means, and the way out.

`edgefl-agent doctor` tells these; where `edgefl-agent run` meets the same trouble, its error carries the id and has the
same words. docs/doctor.md is made from this table.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from edgefl.errors import EdgeFLError

Status = Literal["ok", "warn", "fail"]


class Finding(NamedTuple):
    """A fault of one kind. ``remedy`` may have places ``{…}`` for what is known only where it is found."""

    status: Status
    means: str
    remedy: str


_CLOCK = "timedatectl set-ntp true, or timedatectl set-time 'YYYY-MM-DD hh:mm'"
_ENROL = "ask the coordinator for a new token (`edgefl-coordinator enroll`) and enrol it: edgefl-agent enroll TOKEN"
_RAISE = "Raise the broker's limit (mosquitto: message_size_limit, max_packet_size)"
_NO_FIGURE = "None needed: the report shows why there is no figure."
_BUILD = "Install a torch build for this device ({source})"
_ON_CPU = ", or train on the processor: torch_device: cpu in its profile."

#: id -> the fault. An id is never used for another fault. The check it belongs to is its first word.
FINDINGS: dict[str, Finding] = {
    "python-old": Finding(
        "fail",
        "Python is older than 3.10",
        "Install Python 3.10 or newer (JetPack 6 and later have it).",
    ),
    "clock-behind": Finding(
        "fail", "the clock shows a time before the certificate's, or before this program's", f"Set it: {_CLOCK}."
    ),
    "identity-none": Finding(
        "warn",
        "the device is not enrolled and no broker is named: no connection is tried, and `run` refuses with exit code 2",
        "To enrol it, ask for a token (`edgefl-coordinator enroll`): edgefl-agent enroll TOKEN; else give --broker; "
        "--state where its identity lies elsewhere.",
    ),
    "identity-missing": Finding(
        "fail", "the broker asks for a certificate, and this device shows none", f"Give --cert and --key, or {_ENROL}."
    ),
    "identity-expired": Finding(
        "fail", "the device's certificate has expired", f"Set the clocks here and at the broker; if right, {_ENROL}."
    ),
    "identity-unrenewed": Finding(
        "warn",
        "the certificate should have been renewed by now, and was not",
        "Let the device reach its coordinator: a run, or `edgefl-coordinator enrollments`, renews it.",
    ),
    "identity-revoked": Finding(
        "fail",
        "the fleet has revoked the device's certificate",
        "Stop it (it knocks every few minutes); to let it in again, delete its state directory and enrol it by a token "
        "of `edgefl-coordinator enroll --name NAME --replace`.",
    ),
    "identity-foreign": Finding(
        "fail",
        "the broker does not know the authority of the device's certificate",
        f"Check --cert; if it is of another fleet, {_ENROL}.",
    ),
    "identity-unusable": Finding(
        "fail",
        "the identity's files are damaged, open to others, or not this account's to read",
        "As the error says; else enrol the device anew.",
    ),
    "broker-url": Finding(
        "fail", "the broker's URL is malformed", "Write it as mqtt://[user:password@]host[:port], or mqtts:// for TLS."
    ),
    "broker-unprotected": Finding(
        "warn",
        "the broker is on another machine and the URL is without TLS; `run` refuses it",
        "Use mqtts://, best with a fleet's identity (`edgefl-coordinator init`), or accept it with --insecure.",
    ),
    "broker-name": Finding("fail", "the host name is unknown", "Check its spelling and this machine's DNS."),
    "broker-absent": Finding("fail", "nothing listens there", "Start the broker, or correct the host and port."),
    "broker-idle": Finding(
        "warn",
        "nothing listens where an enrolled device's fleet has its broker",
        "Ask who keeps the server whether a run or `edgefl-coordinator enrollments` is up there: the fleet's broker "
        "ends with them, unless it has a service of its own. While none is up, nothing is wrong with this device, and "
        "`run` waits.",
    ),
    "broker-away": Finding(
        "fail", "the address does not answer", "Check the address, the network and any firewall between."
    ),
    "broker-plain": Finding(
        "fail", "the URL asks for TLS and the port speaks plain MQTT", "Write mqtt://, or the port of the TLS listener."
    ),
    "broker-tls": Finding(
        "fail", "the URL is without TLS and the port speaks TLS", "Write mqtts:// instead of mqtt://."
    ),
    "broker-handshake": Finding(
        "fail", "the TLS handshake fails for another reason", "Check --ca, --cert and --key, and that a broker listens."
    ),
    "broker-expired": Finding(
        "fail",
        "the broker's certificate has expired, or this clock is ahead",
        "If the clock is wrong, set it (timedatectl set-ntp true); else renew the broker's certificate.",
    ),
    "broker-other-host": Finding(
        "fail",
        "the broker's certificate is for another name",
        "Dial the broker by a name or address that its certificate was made for.",
    ),
    "broker-distrusted": Finding(
        "fail",
        "the broker's certificate is of an unknown authority",
        "A device that is not enrolled gets the authority's certificate by `edgefl-agent enroll`, and needs no "
        "--broker then (this port may be the one for enrolment); of a broker without a fleet, give it by --ca FILE.",
    ),
    "broker-silent": Finding("fail", "the port takes connections and does not answer as a broker", "{hint}"),
    "broker-login": Finding(
        "fail",
        "the broker does not admit this user",
        "Correct the user and password in the URL (mqtt://user:password@host), or the broker's password file.",
    ),
    "broker-client-id": Finding(
        "fail", "the broker does not accept the client id", "Choose another device name: it refuses {client!r}."
    ),
    "broker-refuses": Finding("fail", "the broker refuses for another reason", "Its log says more."),
    "broker-topics": Finding(
        "fail",
        "the broker's access list keeps a topic from this device",
        "Grant it in the broker's access list, or check that the fleet and device names match it.",
    ),
    "broker-files": Finding("fail", "a certificate or key does not load", "Give the path of a readable PEM file."),
    "broker-chunks": Finding(
        "warn",
        "the broker takes no chunks of the usual size",
        f"{_RAISE}, or run with --set transfer.chunk_bytes={{fits}}; runs find it by themselves, a little later.",
    ),
    "broker-messages": Finding("fail", "the broker takes no messages of a useful size", f"{_RAISE}."),
    "profile-plan-only": Finding(
        "warn",
        "no agent runs on a device of this profile: it is to plan with",
        "Take the profile of the device that is here, or measure one: edgefl-agent profile.",
    ),
    "torch-missing": Finding("fail", "torch is not installed", "{install}"),
    "torch-library": Finding("fail", "a library that torch needs is missing, or another one", f"{_BUILD}."),
    "torch-processor": Finding("fail", "torch is built for another processor", f"{_BUILD}."),
    "torch-killed": Finding(
        "fail", "the process that imports torch is killed", "Free memory: close other programs, or add swap (zram)."
    ),
    "torch-hangs": Finding("fail", "torch does not answer", "Check the GPU driver: nvidia-smi must answer."),
    "torch-cpu-build": Finding("warn", "a torch for processors only, where there is a GPU", f"{_BUILD}{_ON_CPU}"),
    "torch-no-driver": Finding(
        "warn",
        "a torch for GPUs that its driver does not let at the GPU",
        "Install or update the NVIDIA driver, give the container the GPU (--gpus all)" + _ON_CPU,
    ),
    "torch-no-gpu": Finding(
        "fail",
        "the profile asks for cuda and there is no GPU",
        "Choose another profile, or --set torch_device=auto (or cpu).",
    ),
    "torch-architecture": Finding("fail", "torch is built for other GPUs than this one", f"{_BUILD}{_ON_CPU}"),
    "torch-broken": Finding("fail", "a training step fails", f"{_BUILD}{_ON_CPU}"),
    "onnxruntime-two": Finding(
        "warn",
        "two builds of onnxruntime overwrite each other's files",
        "Keep one: pip uninstall {names}, then install onnxruntime-gpu (with a GPU; the extra `gpu`) or onnxruntime.",
    ),
    "onnxruntime-overwritten": Finding(
        "warn",
        "onnxruntime-gpu is installed and offers no CUDA",
        "Another build's files lie over it: pip install --force-reinstall --no-deps onnxruntime-gpu.",
    ),
    "onnxruntime-cuda": Finding(
        "warn",
        "onnxruntime lists CUDA, and no model runs on it",
        "Install CUDA and cuDNN as this onnxruntime needs them, or predict with --device cpu.",
    ),
    "onnxruntime-jetson": Finding(
        "warn",
        "pip's onnxruntime on a Jetson, which does not use its GPU",
        "pip uninstall -y onnxruntime onnxruntime-gpu, then {source}. pip's own onnxruntime-gpu does not fit: its "
        "aarch64 wheels are for servers' GPUs and Python 3.11 or newer, not for the GPU in a Jetson.",
    ),
    "onnxruntime-broken": Finding("fail", "onnxruntime cannot be imported", "Install it again; check the GPU driver."),
    "memory-little": Finding(
        "warn", "less than 1 GiB of memory is free", "Close other programs, or set budget.memory_bytes in the profile."
    ),
    "memory-beyond": Finding(
        "warn",
        "the budget is above what the machine, its control group or ulimit gives: the kernel kills first",
        "Lower budget.memory_bytes in the profile, or raise the limit (MemoryMax= of the service, docker --memory).",
    ),
    "ceiling-none": Finding(
        "fail",
        "a process beyond its ceiling is not stopped",
        "Let this user read /proc of its own processes (mount it without hidepid; no sandbox around the agent).",
    ),
    "ceiling-late": Finding(
        "warn",
        "a process beyond its ceiling is stopped, but the kernel does not refuse the memory before",
        "Allow prlimit on own processes (a sandbox, such as a service's SystemCallFilter=, forbids it).",
    ),
    "state-permission": Finding(
        "fail",
        "the state directory is not this user's to write",
        "Run it as the account that the directory belongs to, or as root (sudo); else give --state a directory that "
        "this user may write.",
    ),
    "state-no-directory": Finding("fail", "the state's path goes through a file", "Give --state a directory."),
    "state-read-only": Finding(
        "fail", "the state's file system is read-only", "Mount it for writing, or give --state a directory elsewhere."
    ),
    "state-broken": Finding("fail", "the state's disk refuses for another reason", "Check the disk: dmesg, fsck."),
    "disk-none": Finding(
        "fail",
        "no room for the agent's own state: the disk, or this user's quota, is full",
        "Free space, or give --state a directory on another disk.",
    ),
    "disk-little": Finding(
        "warn", "less than 1 GiB of disk is free", "Free space, or set budget.disk_bytes in the profile."
    ),
    "data-unusable": Finding("fail", "the local data cannot be read", "As the error says."),
    "data-unlabelled": Finding(
        "warn",
        "no sample has a label",
        "Recipes that learn from labels cannot use them; `edgefl recipes` lists those that need none.",
    ),
    "energy-none": Finding("warn", "no energy sensor", _NO_FIGURE),
    "temperature-none": Finding(
        "warn", "no temperature sensor", "None needed: the report shows why there is no figure."
    ),
    "doctor-failed": Finding("fail", "a check itself failed", "Run it again with --debug, and please report it."),
}


class Check(msgspec.Struct, frozen=True):
    """One result. ``id``: a key of FINDINGS, or the name and -ok. ``remedy`` is empty when all is well."""

    id: str
    name: str
    status: Status
    detail: str
    remedy: str = ""


def remedy(finding: str, **known: object) -> str:
    """The way out of a finding."""
    return FINDINGS[finding].remedy.format(**known)


def well(name: str, detail: str) -> Check:
    """A result without fault."""
    return Check(f"{name}-ok", name, "ok", detail)


def found(finding: str, detail: str, status: Status | None = None, **known: object) -> Check:
    """A fault. ``status``: where it is not the usual one."""
    usual = FINDINGS[finding]
    return Check(finding, finding.partition("-")[0], status or usual.status, detail, remedy(finding, **known))


def of_error(error: EdgeFLError, otherwise: str) -> Check:
    """The fault that an error tells, in its own words; ``otherwise``: the finding of one that names none."""
    finding = error.finding or otherwise
    return Check(finding, finding.partition("-")[0], FINDINGS[finding].status, error.message, error.remedy)
