"""View of a run in progress: a live display on a terminal, plain lines elsewhere (logs, pipes, CI)."""

from __future__ import annotations

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from edgefl.report import units
from edgefl.report.brief_lines import BriefLines
from edgefl.report.events import KINDS, LEFT_OUT, LiveDevice, LiveState
from edgefl.report.refusals import REVOKED
from edgefl.run_records import EventRow

#: Four redraws a second look alive and cost under 2 % of a core.
REDRAWS_PER_S = 4
#: The display must fit a small terminal; more devices are summed up in one line.
MAX_DEVICES = 16
_BARS = "▁▂▃▄▅▆▇█"
_STYLES = {
    "training": "cyan",
    "done": "green",
    "idle": "dim",
    **dict.fromkeys(("refused", "declined", LEFT_OUT), "yellow"),
    **dict.fromkeys(("rejected", "quarantined", "lost", REVOKED, "late"), "red"),
}


class LiveView:
    """Shows a run. ``feed`` it every event in order; ``close`` it (or use it as a context) at the end.

    ``plain``: lines instead of a display; by default when the console is no terminal. ``verbose``: a line for every
    event, with all its figures, instead of one for every round.
    """

    def __init__(self, console: Console | None = None, *, plain: bool | None = None, verbose: bool = False) -> None:
        self.console = console or Console()
        self.plain = not self.console.is_terminal if plain is None else plain
        self.verbose = verbose
        self._brief = BriefLines()
        self.state = LiveState()
        self._live: Live | None = None

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def feed(self, event: EventRow) -> None:
        """Show one event; unknown kinds only move the clock."""
        text = self.state.apply(event)
        if not self.plain and self._live is None and not self.state.ended:
            self._live = Live(
                console=self.console, get_renderable=self._draw, refresh_per_second=REDRAWS_PER_S, transient=True
            )
            self._live.start()
        if self.verbose:
            self._print(event, text)
        else:
            for one, line in self._brief.of(event, text, self.state):
                self._print(one, line)
        if self.state.ended:
            self.close()

    def _print(self, event: EventRow, text: str | None) -> None:
        refused = event.kind == "stage_planned" and any(not p.get("ok", True) for p in event.data.get("placements", []))
        if text is None or not (self.plain or KINDS[event.kind].kept or refused):
            return
        since = max(0.0, event.at - (self.state.began_at or event.at))  # a device may enrol before the run begins
        clock = f"{since:7.1f} s  "  # before the first line alone
        for words in text.split("\n"):
            line = Text(clock, style="dim").append(words, style=KINDS[event.kind].style)
            self.console.print(line, soft_wrap=self.plain)
            clock = " " * len(clock)

    def close(self) -> None:
        """Stop the display and leave its last state on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            self.console.print(self._draw())

    def _draw(self) -> Group:
        every = [device for _, device in sorted(self.state.devices.items())]
        shown, rest = every[:MAX_DEVICES], every[MAX_DEVICES:]
        blocks: list[Text | Table] = [Text(), _head(self.state), _table(shown)]
        for device in (device for device in shown if device.why):
            words = Text(f"{device.name} {device.word}: ", style=_STYLES.get(device.doing, ""))
            blocks.append(words.append(device.why, style="dim"))
        if rest:
            busy = sum(device.doing in ("training", "waiting") for device in rest)
            blocks.append(Text(f"and {len(rest)} more devices, {busy} of them at work", style="dim"))
        return Group(*blocks, *_scores(self.state))


def _head(state: LiveState) -> Text:
    text = Text(state.name or "run", style="bold")
    text.append(f"  {state.recipe}", style="dim not bold")
    where = f"  stage {state.stage}/{state.stages} · round {state.round}" if state.stage else "  waiting for devices"
    text.append(f"  {state.ended}" if state.ended else where, style="cyan not bold")
    if state.attempt > 1 and not state.ended:
        text.append(f" · attempt {state.attempt}", style="yellow not bold")
    if state.paused and not state.ended:
        text.append(f" · {state.paused}", style="yellow not bold")
    text.append(f"  {state.rounds_done} of {state.rounds_total} rounds done", style="not bold")
    text.append(f"  {units.whole_seconds(state.elapsed_s)}", style="dim not bold")
    return text


def _table(devices: list[LiveDevice]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, expand=False)
    table.add_column("device", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("progress", width=14)
    for name in ("loss", "step memory\npred. / meas. MiB", "sent / recv.\nMiB", "compute\nGFLOP"):
        table.add_column(name, justify="right", no_wrap=True)
    for device in devices:
        done = min(device.step, device.steps) if device.steps else 0
        bar = ProgressBar(total=device.steps or 1, completed=done, width=14)
        table.add_row(
            Text(device.name, style="bold"),
            Text(device.word, style=_STYLES.get(device.doing, "")),
            bar if device.doing in ("training", "done") else "",
            units.number(device.loss),
            f"{_mib(device.predicted_bytes)} / {_mib(device.measured_bytes)}",
            f"{_mib(device.sent_bytes)} / {_mib(device.received_bytes)}",
            units.NOTHING if device.flops is None else units.number(units.scaled(device.flops, "FLOP")),
        )
    return table


def _mib(value: float | None) -> str:
    return units.NOTHING if value is None else units.number(units.scaled(value, "B"))


def _scores(state: LiveState) -> list[Text]:
    """Lines of loss and test metrics with sparklines, then each modality alone by mask."""
    first = Text()
    if state.losses:
        first.append(f"loss {units.number(state.losses[-1])} ", style="bold")
        first.append(f"{sparkline(state.losses)}   ", style="cyan")
    alone: dict[str, list[str]] = {}
    for (metric, given, mask), values in state.scores.items():
        if not units.is_leading(metric):
            continue
        value = units.score(metric, values[-1])
        if mask == "none":
            first.append(f"test {metric} {value} ", style="bold")
            first.append(f"{sparkline(values)}   ", style="green")
        else:
            alone.setdefault(given, []).append(f"{value} {mask} mask")
    lines = [first] if first.plain else []
    each = "   ".join(f"{given} alone: {', '.join(values)}" for given, values in alone.items())
    return [*lines, Text(each, style="dim")] if each else lines


def sparkline(values: list[float], width: int = 24) -> str:
    """Text of bars for the last ``width`` values, between their minimum and maximum."""
    recent = values[-width:]
    low, high = min(recent), max(recent)
    span = high - low
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] if span else _BARS[0] for value in recent)
