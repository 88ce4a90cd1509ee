"""The last sections: the conditions of the run, and what it did not measure."""

from jax_ep.tools.measurement import Measurement
from jax_ep.tools.page import units
from jax_ep.tools.page.document import Facts, Section


def setting(measurement: Measurement) -> str:
    """What was run, in a line."""
    layer = measurement.layer
    device = measurement.about.get("device", "an unnamed device")
    return (
        f"{layer.ranks} × {device}. {units.count(layer.tokens)} tokens a rank, hidden "
        f"{layer.hidden}, {layer.experts} experts, top-{layer.topk}, {layer.dtype}, "
        f"{measurement.routing} routing."
    )


def busy_host(measurement: Measurement) -> str | None:
    """That the cores of CPU devices had other work, where they had much of it."""
    load, cores = (measurement.about.get(name) for name in ("load", "cores"))
    if load is None or cores is None or float(load) <= 1.5 * int(cores):
        return None
    return (
        f"The host was busy: a load of {load} on {cores} cores. Its CPU devices were "
        "measured beside other work, so no time here says much."
    )


def section(measurement: Measurement) -> Section:
    """Versions, device, command, shapes, ceilings."""
    layer, ceilings = measurement.layer, measurement.ceilings
    shapes = (
        f"T {layer.tokens}, H {layer.hidden}, F {layer.expert_hidden}, K {layer.topk}, "
        f"E {layer.experts}, R {layer.ranks}, C {layer.capacity}, expert alignment "
        f"{layer.expert_alignment}, {layer.dtype}"
    )
    rows = [
        (name.replace("_", " "), text or "none")
        for name, text in measurement.about.items()
    ]
    rows += [("shapes", shapes), ("routing", measurement.routing)]
    if ceilings is not None:
        links = [
            f"link {way} {units.rate(rate)}"
            for way, rate in (("out", ceilings.egress), ("in", ceilings.ingress))
            if rate is not None
        ]
        memory = f"memory {units.rate(ceilings.memory)}"
        rows.append(("ceilings", ", ".join([*links, memory])))
    facts = Facts("What was run, on what", rows)
    return Section("conditions", "Conditions", [facts])


def gaps(measurement: Measurement) -> Section:
    """What a reader might look for and not find."""
    return Section(
        "gaps",
        "Not measured",
        [*missing(measurement), "Never part of this page: traffic between nodes, the "
         "router, the optimiser, compilation, and other work on the same devices."],
    )  # fmt: skip


def missing(measurement: Measurement) -> list[str]:
    """A sentence for each part of the measurement that is None."""
    found = []
    ceilings = measurement.ceilings
    if ceilings is None:
        found.append("The machine's ceilings, so no floor and no fraction of it.")
    elif ceilings.egress is None or ceilings.ingress is None:
        found.append("The link's ceilings: the ranks are devices of one process.")
    whole = {exchange.stage for exchange in measurement.exchanges}
    for stage in ("dispatch", "combine", "dispatch backward", "combine backward"):
        if stage not in whole:
            found.append(f"The stage {stage}.")
    without = [e.stage for e in measurement.exchanges if e.phases is None]
    if without:
        found.append(f"The phases of {', '.join(without)}: no stamped build was run.")
    if measurement.load.rank_seconds is None:
        found.append("The time of each rank's experts, so who is last in time.")
    if measurement.overlap is None:
        found.append("Overlap: no program with independent compute was run.")
    if "not measured" in measurement.about:
        found.append(f"As the benchmark says: {measurement.about['not measured']}.")
    return found
