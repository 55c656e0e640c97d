"""``edgefl serve``: exported bundles over HTTP, and over MQTT where asked. No torch."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from edgefl.api.runs import RUNS
from edgefl.cli.options import BundleArgument, RunsOption, bundle_folder
from edgefl.process.listening import read_place
from edgefl.serve.limits import DEFAULT, LISTENER, TOKEN, Limits

if TYPE_CHECKING:
    from edgefl.serve.catalogue import Catalogue

_MIB = 2**20


def command(
    bundle: BundleArgument,
    host: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help=f"Where to listen, as HOST:PORT, HOST or :PORT; default: {DEFAULT[0]}:{DEFAULT[1]}, this machine "
            "alone, or another port where that one is taken.",
        ),
    ] = "",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="The port alone, as --host :PORT.")] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda", "tensorrt"],
        typer.Option(help="Where to compute; auto: TensorRT, CUDA or the CPU, the first that works here."),
    ] = "auto",
    name: Annotated[str, typer.Option(help="The model's name; default: that of the run, or of the folder.")] = "",
    threads: Annotated[int, typer.Option(min=0, help="Threads of onnxruntime; 0: one a core.")] = 0,
    max_batch: Annotated[int, typer.Option(min=1, max=1024, help="Samples computed at a time.")] = 64,
    micro_batch: Annotated[
        int,
        typer.Option(
            min=0,
            max=64,
            help="Samples of one call of onnxruntime; 0: the fastest of each bundle here, measured at the start in "
            "three seconds or so.",
        ),
    ] = 0,
    max_delay_ms: Annotated[
        float, typer.Option(min=0, max=1000, help="Wait at most so long for as many requests as the last batch had.")
    ] = 5.0,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Requests that may wait; others are told to try again.")
    ] = 256,
    max_body_mib: Annotated[int, typer.Option(min=1, max=1024, help="MiB of a request; four times that of all.")] = 32,
    mqtt: Annotated[
        str,
        typer.Option(
            metavar="URL",
            envvar="EDGEFL_SERVE_MQTT",
            help="Answer on this MQTT broker's topics too: mqtts://USER:PASSWORD@HOST.",
        ),
    ] = "",
    mqtt_ca: Annotated[str, typer.Option(metavar="FILE", help="The authority of that broker's certificate.")] = "",
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds for an answer.")] = 30.0,
    runs: RunsOption = RUNS,
) -> None:
    """Answer inference requests over HTTP: the Open Inference Protocol v2, raw files at /predict, /metrics.

    The folder of all bundles is one model that takes any of its modalities; each bundle is a model of its own, which
    takes exactly its inputs. With EDGEFL_SERVE_TOKEN set, clients need that token. docs/serving.md has examples.

    Examples: edgefl serve latest · edgefl serve runs/ID/bundles · edgefl serve bundles --host 0.0.0.0:8481
    """
    import python_multipart  # noqa: F401 - alone in the extra `serve`, which brings everything else that follows

    from edgefl.serve.catalogue import load_catalogue
    from edgefl.serve.mqtt import Broker, Way
    from edgefl.serve.server import Serving, serve
    from edgefl.transport.address import check_protected, parse_url

    if mqtt:
        check_protected(mqtt, insecure=False)
    place = read_place(f"{host}:{port}" if port else host, DEFAULT, LISTENER)
    folder = bundle_folder(bundle, runs)
    catalogue = load_catalogue(folder, name=name, device=device, threads=threads, micro_batch=micro_batch)
    limits = Limits(
        body_bytes=max_body_mib * _MIB,
        room_bytes=4 * max_body_mib * _MIB,
        batch_rows=max_batch,
        delay_s=max_delay_ms / 1000,
        waiting=max_waiting,
        answer_s=timeout_s,
    )
    if not place.is_loopback:
        sys.stderr.write(
            f"warning: {place.host} can be reached from elsewhere, without encryption"
            f"{'' if os.environ.get(TOKEN) else f'; without {TOKEN} anybody there may ask'}: see docs/serving.md\n"
        )
    ways = (lambda engine: Way(Broker(mqtt, mqtt_ca), engine).run(),) if mqtt else ()
    by_mqtt = f", on edgefl-serve/# of {parse_url(mqtt)}" if mqtt else ""
    serve(Serving(catalogue, limits, ways), place, lambda url: typer.echo(_sentence(url + by_mqtt, catalogue)))


def _sentence(url: str, catalogue: Catalogue) -> str:
    names = list(catalogue.models)
    listed = f"{names[0]} (any of {', '.join(catalogue.main.inputs)})"
    others = f", and each alone as {', '.join(names[1:])}" if len(names) > 1 else ""
    return f"Serving {listed}{others} at {url}, computed by {catalogue.main.runs_on}; Ctrl-C ends it."
