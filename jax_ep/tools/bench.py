"""`python -m jax_ep bench`: what an exchange takes here, and what holds it back."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import rich.progress
import typer

from jax_ep.tools import bench_view, console, flags, measurement
from jax_ep.tools.benchmark.request import Request
from jax_ep.tools.benchmark.run import measure
from jax_ep.tools.console import UserError
from jax_ep.tools.measurement import Measurement
from jax_ep.tools.models import find_model

__all__ = ["Request", "bench", "make_request", "measure", "measure_with_progress"]


def bench(
    model: Annotated[str | None, flags.MODEL] = None,
    tokens: Annotated[int | None, flags.TOKENS] = None,
    hidden: Annotated[int | None, flags.HIDDEN] = None,
    expert_hidden: Annotated[int | None, flags.EXPERT_HIDDEN] = None,
    shared_hidden: Annotated[
        int | None, typer.Option(help="Of the shared expert; 0 is none.")
    ] = None,
    topk: Annotated[int | None, flags.TOPK] = None,
    experts: Annotated[int | None, flags.EXPERTS] = None,
    ranks: Annotated[
        int | None, typer.Option(help="R; all GPUs, or 4 CPU devices.")
    ] = None,
    platform: Annotated[
        str | None, typer.Option(help="cpu or gpu; GPUs where there are any.")
    ] = None,
    routing: Annotated[
        str, typer.Option(help="uniform, zipf, one-hot, or a recorded file.")
    ] = "uniform",
    layer: Annotated[
        str | None, typer.Option(help="Of a recorded file; its first.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Batches of the routing: 8, or all recorded.")
    ] = None,
    capacity_factor: Annotated[
        str,
        typer.Option(
            help="Receive rows over T*K; none is dropless, demand what these batches "
            "need."
        ),
    ] = "demand",
    capacity: Annotated[
        int | None, typer.Option(help="C, rows, in place of a factor.")
    ] = None,
    alignment: Annotated[int, flags.ALIGNMENT] = 1,
    num_sms: Annotated[int | None, flags.NUM_SMS] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Writes the measurement there, for report.")
    ] = None,
    json: Annotated[bool, flags.JSON] = False,
) -> None:
    """Measure the exchanges and the experts on your shapes and your routing.

    Every result is first compared with the reference, bit by bit. Then: the
    time of each exchange, and how much of this machine's speed it reaches;
    rows and time of every rank; and what runs beside what. Runs on all GPUs,
    else on CPU devices.
    """
    if out is not None:
        check_writable(out)
    request = make_request(
        model,
        Request(
            tokens=tokens,
            hidden=hidden,
            expert_hidden=expert_hidden,
            shared_hidden=shared_hidden,
            topk=topk,
            experts=experts,
            platform=platform,
            ranks=ranks,
            capacity_factor=capacity_factor,
            capacity=capacity,
            alignment=alignment,
            num_sms=num_sms,
            dtype=dtype,
            routing=routing,
            layer=layer,
            steps=steps,
        ),
    )
    found = measure_with_progress(request)
    if out is not None:
        found.write(out)
    if json:
        console.print_json({"format": measurement.FORMAT, **dataclasses.asdict(found)})
        return
    bench_view.show(found)
    if out is not None:
        console.console.print(
            f"\nWritten to {out}: jax_ep report {out}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def make_request(model: str | None, request: Request) -> Request:
    """The request, with a model's shapes where it leaves them open.

    Raises:
      UserError: no such model.
    """
    if model is None:
        return request
    known = find_model(model)
    shapes = dict(
        hidden=known.hidden,
        expert_hidden=known.expert_hidden,
        topk=known.topk,
        experts=known.experts,
        dtype=known.dtype,
    )
    unset = {
        name: value for name, value in shapes.items() if getattr(request, name) is None
    }
    return dataclasses.replace(request, **unset)


def measure_with_progress(request: Request) -> Measurement:
    """`measure`, with a bar on standard error."""
    columns = (
        rich.progress.BarColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.description}"),
    )
    # Drawn seldom: on CPU devices it runs on the cores that are measured.
    with rich.progress.Progress(
        *columns, console=console.errors, refresh_per_second=2, transient=True
    ) as bar:
        task = bar.add_task("", total=1.0)
        return measure(
            request,
            lambda text, share: bar.update(task, description=text, completed=share),
        )


def check_writable(path: Path) -> None:
    """Before minutes of measuring.

    Raises:
      UserError: the folder is missing or cannot be written to.
    """
    folder = path.parent
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder, to write {path.name} in.")
    if path.is_dir():
        raise UserError(f"{path}: is a folder; out must be a file.")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder}: not writable, so {path.name} cannot be there.")
