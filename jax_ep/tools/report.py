"""`python -m jax_ep report`: where the time of an exchange goes, as a page."""

import copy
import dataclasses
import inspect
import webbrowser
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from jax_ep.tools import bench, bench_view, console, profile
from jax_ep.tools import measurement as document
from jax_ep.tools.console import UserError
from jax_ep.tools.diagnosis import Diagnosis, diagnose
from jax_ep.tools.page import build, profiled
from jax_ep.tools.page.document import Page


def report(
    measurement: Annotated[
        Path | None,
        typer.Argument(
            help="What bench --out wrote. Without it, and without --profile, bench "
            "runs first, with its own options.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page, one HTML file.")] = Path(
        "report.html"
    ),
    png: Annotated[
        Path | None, typer.Option(help="A folder for every chart as a PNG.")
    ] = None,
    profile_folder: Annotated[
        Path | None,
        typer.Option("--profile", help="What jax.profiler.trace wrote, shown too."),
    ] = None,
    open_page: Annotated[
        bool, typer.Option("--open", help="Opens the page in a browser.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Prints the diagnosis.")] = False,
    **benchmark: Any,
) -> None:
    """Shows what holds a run back: bandwidth, padding, load or overlap.

    Reads a measurement, or takes one, and writes one page that needs no network.
    """
    bench.check_writable(out)
    found = None if profile_folder is None else profile.read(profile_folder)
    taken = _measurement(measurement, benchmark, found is not None)
    diagnosis = None if taken is None else diagnose(taken)
    if taken is not None and diagnosis is not None:
        page = build.page(taken, diagnosis, found)
    else:
        assert found is not None  # There is a measurement unless there is a profile.
        page = profiled.page(found)
    _write(page, out, png)
    if json:
        summary: dict[str, Any] = {"page": str(out)}
        if diagnosis is not None:
            summary |= dataclasses.asdict(diagnosis)
        if found is not None:
            summary["profile"] = [dataclasses.asdict(d) for d in found.devices]
        console.print_json(summary)
    else:
        _show(page, diagnosis, out, png)
    if open_page:
        webbrowser.open(out.resolve().as_uri())


def _measurement(
    path: Path | None, benchmark: dict[str, Any], profiled: bool
) -> document.Measurement | None:
    """The one that is read or taken; None where a profile is all that was asked for."""
    if path is None and not profiled:
        model = benchmark.pop("model")
        request = bench.make_request(model, bench.Request(**benchmark))
        return bench.measure_with_progress(request)
    options = _bench_options()
    for name, value in benchmark.items():
        if value != options[name].default:
            option = "--" + name.replace("_", "-")
            raise UserError(
                f"report: {option} (={value}) is an option of the benchmark, which "
                "does not run when there is a measurement or a profile to read."
            )
    if path is None:
        return None
    try:
        return document.read(path)
    except ValueError as error:
        raise UserError(str(error)) from None


def _write(page: Page, out: Path, png: Path | None) -> None:
    """Page and pictures, each whole or not at all."""
    if png is not None:
        from jax_ep.tools.page import picture  # matplotlib takes a second to import.

        png.mkdir(parents=True, exist_ok=True)
        for drawing in page.drawings():
            picture.save(drawing, png / f"{drawing.name}.png")
    partial = out.with_name(out.name + ".partial")
    try:
        partial.write_text(page.html(), encoding="utf-8")
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)


def _show(page: Page, diagnosis: Diagnosis | None, out: Path, png: Path | None) -> None:
    console.console.print(page.verdict, highlight=False, markup=False)
    if diagnosis is not None:
        console.show_table(
            bench_view.lost(diagnosis), least=bench_view.LEAST_FOR_SENTENCES
        )
    written = f"{out}" if png is None else f"{out}, and pictures in {png}"
    console.console.print(f"Written: {written}", highlight=False, markup=False)


def _bench_options() -> dict[str, inspect.Parameter]:
    """The options of bench that say what is measured."""
    mine = {"out", "json"}
    options = inspect.signature(bench.bench, eval_str=True).parameters
    return {name: option for name, option in options.items() if name not in mine}


def _signature() -> inspect.Signature:
    """Of `report`, with bench's options in the place of `benchmark`: typer reads it."""
    own = list(inspect.signature(report, eval_str=True).parameters.values())[:-1]
    theirs = []
    for option in _bench_options().values():
        kind, info = get_args(option.annotation)
        info = copy.copy(info)
        info.rich_help_panel = "Options of bench, where it runs"
        theirs.append(option.replace(annotation=Annotated[kind, info]))
    return inspect.Signature([*own, *theirs])


report.__signature__ = _signature()  # type: ignore[attr-defined]
