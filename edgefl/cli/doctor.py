"""``edgefl doctor``: is this machine fit to train, and does it reach the broker?"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from edgefl.cli.options import Format, print_json

BrokerOption = Annotated[
    str, typer.Option("--broker", help="Also try this broker, such as mqtts://user:password@host:8883.")
]


def command(
    broker: BrokerOption = "",
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Where torch shall try a training step.")
    ] = "auto",
    format: Format = "terminal",  # noqa: A002  # the option's own name
) -> None:
    """Check this machine: Python, a real training step with torch, memory, disk, sensors, and the broker if named.

    Ends with exit code 1 when a check failed; warnings do not count.

    Example: edgefl doctor --broker mqtt://192.168.1.10:1883
    """
    from device_agent.tools.doctor import Check, examine

    checks = examine(broker=broker, torch_device=device)
    if format == "json":
        print_json(checks)
    else:
        from rich.console import Console

        from edgefl.report.grid import Cell, Column, Tone, table
        from edgefl.report.terminal import print_grid

        tones: dict[str, Tone] = {"ok": "good", "warn": "warn", "fail": "bad"}
        columns: list[Column[Check]] = [
            Column("check", lambda check: check.name, key=True, text=True),
            Column("result", lambda check: Cell(check.status, tone=tones[check.status]), text=True),
            Column("found", lambda check: check.detail, text=True),
            Column("what to do", lambda check: check.remedy, text=True),
        ]
        print_grid(table("This machine", columns, checks), Console())
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)
