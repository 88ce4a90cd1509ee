"""`python -m jax_ep doctor`: whether this machine is fit for jax_ep, and the remedy."""

import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Annotated

import rich.markup
import rich.padding
import rich.table
import typer

from jax_ep import _ffi, nvrtc, registration
from jax_ep.kernels import DEFAULT_ARCHITECTURES
from jax_ep.tools import console
from jax_ep.tools.checks import (
    driver,
    experts,
    gpus,
    kernels,
    module,
    nccl,
    round_trip,
    versions,
)
from jax_ep.tools.checks.outcome import NO_CUDA, Outcome

FORMAT = "jax_ep doctor 1"

_SEEN_TIMEOUT_S = 120.0  # To start JAX on all GPUs of a busy machine.
_LEAST_FOR_TABLE = 80  # Characters; half of them stay for what was found.
_STYLES = {"healthy": "green", "problem": "bold red", "not applicable": "dim"}


def doctor(
    timeout: Annotated[
        float, typer.Option(help="Seconds that an exchange on real devices may take.")
    ] = 180.0,
    json: Annotated[bool, typer.Option(help="For machines.")] = False,
) -> None:
    """Is this machine fit for jax_ep? Says what to do about each problem.

    Looks at versions, the compiled module, GPUs and their links, NVRTC and NCCL; then
    makes a real exchange on CPU devices and on the GPUs, compared bit for bit.

    Exit status 0: healthy, 1: a problem.
    """
    if not timeout > 0:
        raise console.UserError(f"--timeout (={timeout:g}) must be positive.")
    outcomes = []
    with console.errors.status("versions") as status:
        for outcome in examine(timeout, status.update):
            outcomes.append(outcome)
    num_problems = sum(outcome.state == "problem" for outcome in outcomes)
    if json:
        console.print_json(
            dict(
                format=FORMAT,
                healthy=not num_problems,
                checks=[dataclasses.asdict(outcome) for outcome in outcomes],
            )
        )
    else:
        show(outcomes)
    if num_problems:
        raise typer.Exit(1)


def examine(timeout_s: float, say=lambda text: None) -> Iterator[Outcome]:
    """Every check of this machine, one after another.

    Args:
      timeout_s: for each exchange.
      say: is told what comes next.
    """
    environment = os.environ
    system = gpus.nvidia_devices()
    is_hidden = bool(gpus.hidden_by(environment))
    has_gpus = bool(system) and not is_hidden
    packages = versions.installed()
    extra = versions.extra(packages)
    has_plugin = any(name in packages for name in versions.PLUGINS)
    yield from versions.check(sys.version_info[:3], packages, has_gpus)
    yield from module.check(
        _ffi,
        registration.runtime_api_version(),
        registration.has_cuda(),
        has_gpus,
    )

    say("starting JAX on the GPUs")
    seen, why_unseen, failures, cuda = [], "", [], None
    if (system or has_plugin) and not is_hidden:
        seen, why_unseen, failures = seen_gpus(environment)
    if seen:
        cuda = driver.ask()
    yield from gpus.check(system, seen, why_unseen, cuda, environment, failures)

    say("compiling a kernel")
    is_needed = bool(seen) or kernels.has_compiler()
    yield from kernels.check(is_needed, architectures(cuda), extra=extra)
    yield kernels.check_cache(is_needed, nvrtc.cache_folder())
    yield from nccl.check(bool(seen), nccl.library_path(), environment, extra=extra)
    yield experts.check(seen)

    say("an exchange on CPU devices")
    yield round_trip.check("cpu", environment, timeout_s)
    if seen:
        say("an exchange on the GPUs")
        yield round_trip.check("cuda", environment, timeout_s)
    else:
        yield round_trip.SUBJECT.not_applicable("GPUs", NO_CUDA)


def seen_gpus(environment) -> tuple[list[str], str, list[str]]:
    """What JAX in a process of its own makes of the GPUs.

    Returns their kinds; or why there are none; and of plugins that did not start, why.
    """
    changed = round_trip.environment_of("cuda", environment)
    ended = round_trip.run(["-m", "jax_ep.tools.checks.seen"], changed, _SEEN_TIMEOUT_S)
    found = ended.lines[-1] if ended.lines else {}
    failures = found.get("plugin", [])
    if "kinds" in found:
        return found["kinds"], "", failures
    if ended.status is None:
        return [], f"JAX did not start within {_SEEN_TIMEOUT_S:g} s", failures
    return [], ended.complaint or found.get("error", ""), failures


def architectures(found: driver.Driver | None) -> tuple[str, ...]:
    """Of the GPUs here, else those that a machine without GPUs compiles for."""
    capabilities = sorted({gpu.capability for gpu in found.gpus}) if found else []
    names = tuple(f"sm_{major}{minor}a" for major, minor in capabilities)
    return names or DEFAULT_ARCHITECTURES[:1]


def show(outcomes: list[Outcome]) -> None:
    """For people: each check, and below it what to do."""
    groups = [
        (subject, _shortened(list(found)))
        for subject, found in itertools.groupby(outcomes, lambda o: o.subject)
    ]
    if console.console.width < _LEAST_FOR_TABLE:
        _list(groups)
    else:
        _table(groups)
    num_problems = sum(outcome.state == "problem" for outcome in outcomes)
    num_healthy = sum(outcome.state == "healthy" for outcome in outcomes)
    console.console.print()
    checks = "check" if num_healthy == 1 else "checks"
    if num_problems:
        noun = "problem" if num_problems == 1 else "problems"
        console.console.print(
            f"[bold red]{num_problems} {noun}[/], {num_healthy} healthy."
        )
    else:
        console.console.print(f"[bold green]Healthy[/]: {num_healthy} {checks}.")


def _table(groups: list[tuple[str, list[Outcome]]]) -> None:
    table = rich.table.Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for subject, found in groups:
        table.add_row()
        for n, outcome in enumerate(found):
            table.add_row(
                "" if n else subject,
                outcome.name,
                _state(outcome),
                rich.markup.escape(outcome.found),
            )
            if outcome.remedy:
                table.add_row("", "", "", _remedy(outcome))
    console.console.print(table)


def _list(groups: list[tuple[str, list[Outcome]]]) -> None:
    for subject, found in groups:
        console.console.print(f"\n[bold]{subject}[/]")
        for outcome in found:
            head = f"{outcome.name}: " if outcome.name else ""
            text = f"{head}{_state(outcome)}: {rich.markup.escape(outcome.found)}"
            lines = [text, _remedy(outcome)] if outcome.remedy else [text]
            for line in lines:
                padded = rich.padding.Padding(line, (0, 0, 0, 2))
                console.console.print(padded, highlight=False)


def _state(outcome: Outcome) -> str:
    return f"[{_STYLES[outcome.state]}]{outcome.state}[/]"


def _remedy(outcome: Outcome) -> str:
    return f"[bold]what to do:[/] {rich.markup.escape(outcome.remedy or '')}"


def _shortened(outcomes: list[Outcome]) -> list[Outcome]:
    """One line for a subject's checks that do not apply, if it is for one reason."""
    absent = [outcome for outcome in outcomes if outcome.state == "not applicable"]
    if len({outcome.found for outcome in absent}) != 1 or outcomes[-1] != absent[-1]:
        return outcomes
    present = [outcome for outcome in outcomes if outcome not in absent]
    if present and len(absent) == 1:
        return outcomes
    return [*present, dataclasses.replace(absent[0], name="")]
