"""Self-contained HTML pages: templates with styles, static charts and a content security policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgefl import __version__
from edgefl.console import safe_lines
from edgefl.report import charts
from edgefl.report.charts import Chart
from edgefl.report.grid import letters


def page(template: str, drawn: Sequence[Chart], *, interactive: bool = False, **values: Any) -> str:
    """The page of a template with its charts as ``figures``; ``interactive``: with Vega (0.9 MB) in it.

    A browser fetches nothing for it, and runs no script but that one. Needs the extra ``coordinator``.
    """
    import jinja2

    loader = jinja2.PackageLoader("edgefl.report", "templates")
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.globals["mark"] = letters
    environment.filters["coded"] = lambda text: charts.coded(str(_shown(text)))
    script = charts.script() if interactive and drawn else ""
    return environment.get_template(template).render(
        **values,
        style=loader.get_source(environment, "style.css")[0],
        light=charts.variables(0),
        dark=charts.variables(1),
        script=script,
        allowed=charts.allowed(script),
        version=__version__,
        figures=[charts.figure(chart, interactive=interactive) for chart in drawn],
    )


def _shown(value: object) -> object:
    """Text values without control characters; other values, and our own markup, unchanged."""
    return safe_lines(value) if type(value) is str else value
