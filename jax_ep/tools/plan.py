"""`python -m jax_ep plan`: what an exchange will cost, before there is a machine."""

import contextlib
import dataclasses
import math
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from jax_ep import sizing
from jax_ep.tools import console, flags, plan_view
from jax_ep.tools.console import UserError
from jax_ep.tools.estimate import make_plan
from jax_ep.tools.models import Model, find_model

FORMAT = "jax_ep plan 2"


def plan(
    model: Annotated[
        str | None, typer.Argument(help=f"{flags.MODEL_HELP} Options override.")
    ] = None,
    model_option: Annotated[
        str | None, typer.Option("--model", help="The same, by its name elsewhere.")
    ] = None,
    ranks: Annotated[int, flags.RANKS] = 8,
    tokens: Annotated[int, flags.TOKENS] = 8192,
    hidden: Annotated[int | None, flags.HIDDEN] = None,
    experts: Annotated[int | None, flags.EXPERTS] = None,
    topk: Annotated[int | None, flags.TOPK] = None,
    expert_hidden: Annotated[int | None, flags.EXPERT_HIDDEN] = None,
    groups: Annotated[
        int | None, typer.Option(help="Groups of group-limited routing.")
    ] = None,
    topk_groups: Annotated[
        int | None, typer.Option(help="Groups that a token may choose from.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="MoE layers.")] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Of rows: bfloat16, float16, float32; or float8 or mxfp8, which is "
            "wire= of dispatch alone: sums and the backward are bfloat16."
        ),
    ] = "bfloat16",
    capacity_factor: Annotated[
        str, typer.Option(help="Receive rows over T*K; none is dropless.")
    ] = "none",
    alignment: Annotated[int, flags.ALIGNMENT] = 1,
    machine: Annotated[
        str, typer.Option(help=f"{', '.join(sizing.MACHINES)}: rates of a GPU.")
    ] = "h200",
    gpus_per_node: Annotated[
        int | None, typer.Option(help="G, GPUs of an NVLink domain: domain_size.")
    ] = None,
    network_capacity_factor: Annotated[
        float | None,
        typer.Option(
            help="Room between domains over uniform routing's need. Left out: for all "
            "tokens; with a capacity factor, 1.06 from eight domains on."
        ),
    ] = None,
    chunks: Annotated[
        int, typer.Option(help="Parts of a batch whose hops would overlap.")
    ] = 4,
    link_rate: Annotated[
        float | None, typer.Option(help="GB/s out of a GPU over NVLink.")
    ] = None,
    nic_rate: Annotated[
        float | None, typer.Option(help="GB/s out of a GPU to other nodes.")
    ] = None,
    memory_rate: Annotated[
        float | None, typer.Option(help="GB/s of memory, read plus written.")
    ] = None,
    num_sms: Annotated[int | None, flags.NUM_SMS] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture: FILE.png or FILE.svg.")
    ] = None,
    json: Annotated[bool, flags.JSON] = False,
) -> None:
    """Bytes, memory and least time of a model's expert exchange, from EP2 to EP2048.

    Needs no GPU. Routing is uniform, and times are lower bounds: bytes over rates.
    """
    if model and model_option:
        raise UserError(f"--model (={model_option}) must be alone, without {model}.")
    if plot is not None:
        plan_view.check_picture(plot)
    with _refused():
        rates = _machine(machine, gpus_per_node, link_rate, nic_rate, memory_rate)
        if num_sms is not None and rates.sm_write_rate is None:
            raise UserError(
                f"--num-sms (={num_sms}) needs the rates of one SM, which were not "
                f"measured on {machine}."
            )
        found = make_plan(
            _model(
                model_option or model,
                hidden=hidden,
                experts=experts,
                topk=topk,
                expert_hidden=expert_hidden,
                n_group=groups,
                topk_group=topk_groups,
                layers=layers,
            ),
            ranks=ranks,
            tokens=tokens,
            dtype=dtype,
            capacity_factor=flags.capacity_factor(capacity_factor),
            alignment=alignment,
            network_capacity_factor=network_capacity_factor,
            chunks=chunks,
            machine=rates,
            num_sms=num_sms,
        )
    if plot is not None:
        plan_view.draw(found, plot)
    if json:
        console.print_json({"format": FORMAT, **dataclasses.asdict(found)})
    else:
        plan_view.show(found)
        if plot is not None:
            console.console.print(
                f"Picture: {plot}", highlight=False, markup=False, soft_wrap=True
            )


@contextlib.contextmanager
def _refused():
    """What the package refuses, as a line without the name of its function."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UserError(re.sub(r"^jax_ep\.[\w.]+: ", "", str(error))) from None


def _model(name: str | None, **given: int | None) -> Model:
    """A known model, with what the options say otherwise."""
    values: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    # The others are checked where they are used. 0 is an expert without weights.
    for key, least in (("layers", 1), ("expert_hidden", 0)):
        if values.get(key, least) < least:
            option = "--" + key.replace("_", "-")
            raise UserError(f"{option} (={values[key]}) must be at least {least}.")
    if name is not None:
        return dataclasses.replace(find_model(name), **values)
    missing = [f"--{k}" for k in ("hidden", "experts", "topk") if k not in values]
    if missing:
        raise UserError(f"plan: give the name of a model, or {', '.join(missing)} too.")
    values = {"repository": "", "expert_hidden": 0, "layers": 1} | values
    return Model(**values)


def _machine(name, gpus_per_node, link_rate, nic_rate, memory_rate) -> sizing.Machine:
    if name not in sizing.MACHINES:
        raise UserError(
            f"--machine (={name}) must be one of {', '.join(sizing.MACHINES)}; its "
            "rates can be given by --link-rate, --nic-rate and --memory-rate."
        )
    found = sizing.MACHINES[name]
    given = dict(link_rate=link_rate, nic_rate=nic_rate, memory_rate=memory_rate)
    for key, rate in given.items():
        if rate is not None and not 0 < rate < math.inf:
            option = "--" + key.replace("_", "-")
            raise UserError(f"{option} (={rate:g}) must be positive, in GB/s.")
    values: dict[str, Any] = {k: v * 1e9 for k, v in given.items() if v is not None}
    if values:
        own = ", ".join(name.replace("_", " ") for name in values)
        origin = {**found.origin, **dict.fromkeys(values, "given")}
        values |= dict(source=f"{own} as given; {found.source}", origin=origin)
    if gpus_per_node is not None:
        values["domain_size"] = gpus_per_node
    return dataclasses.replace(found, **values)
