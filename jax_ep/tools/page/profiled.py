"""What a JAX profile shows: a page of its own, or a section of a measurement's page."""

from jax_ep.tools.page import bars, units
from jax_ep.tools.page.document import (
    Facts,
    Figure,
    Finding,
    Page,
    Part,
    Section,
    Table,
)
from jax_ep.tools.page.drawing import Drawing
from jax_ep.tools.page.overlap import timeline
from jax_ep.tools.profile import Device, Profile

_MOST_SPANS = 1500  # of a timeline; a page with more is slow to open
_MOST_DEVICES = 16  # of a chart of bars


def page(profile: Profile) -> Page:
    """Of a profile alone."""
    return Page(
        title="jax_ep: what a JAX profile shows",
        verdict=finding(profile.devices),
        setting=f"{profile.path}: {len(profile.devices)} devices, {profile.platform}.",
        sections=[
            section(profile),
            Section(
                "gaps",
                "Not measured",
                [
                    "A profile has no ceilings, rows or padding: bandwidth, padding "
                    "and load need jax_ep bench.",
                ],
            ),
        ],
    )


def section(profile: Profile) -> Section:
    """Stages, communication beside compute, and one round trip on a timeline."""
    parts: list[Part] = [
        Finding(finding(profile.devices)),
        "A stage's time is the sum of its events on a device. The backward of dispatch "
        "is a combine and counts as one, that of combine as a dispatch.",
        _stages(profile),
        _overlaps(profile),
    ]
    start, stop = _round_trip(profile)
    spans = profile.spans(start, stop)
    if len(spans) > _MOST_SPANS:
        parts.append(f"The first {_MOST_SPANS} pieces of {len(spans)} are drawn.")
        spans = spans[:_MOST_SPANS]
    if spans:
        title = "One round trip, from a layout to the next"
        parts.append(timeline(spans, "profile-timeline", title))
    parts.append(Facts("What was read", [("profile", profile.path)]))
    return Section("profile", "Profile", parts)


def finding(devices: list[Device]) -> str:
    """How much of the communication ran beside compute."""
    worst = max(devices, key=lambda device: device.communication_seconds)
    alone = worst.communication_seconds - worst.overlapped_seconds
    share = worst.overlapped_seconds / (worst.communication_seconds or 1.0)
    total = units.seconds(worst.communication_seconds)
    return (
        f"{units.percent(share)} of the communication runs beside compute. Device "
        f"{worst.device} communicates for {total}, "
        f"for {units.seconds(alone)} of it with nothing beside."
    )


def _stages(profile: Profile) -> Figure:
    devices = profile.devices
    rows, cells = [], []
    for stage in devices[0].seconds:
        slowest = max(devices, key=lambda device: device.seconds[stage])
        seconds, count = slowest.seconds[stage], slowest.counts[stage]
        if not count:
            continue
        exchange = stage in ("layout", "dispatch", "combine")
        fill = "communication" if exchange else "compute"
        note = f"{units.count(count)} events, {units.seconds(seconds / count)} each"
        value = units.seconds(seconds)
        rows.append(bars.Row(stage, value, [(seconds, fill, value)], note))
        each = [units.seconds(device.seconds[stage]) for device in devices]
        cells.append([stage, units.count(count), *each])
    drawing = Drawing(
        "profile-stages",
        "Time by stage, of the device that spends most on it",
        "; ".join(f"{row.label} {row.value}" for row in rows),
        [("communication", "communication"), ("compute", "compute")],
    )
    head = ("Stage", "Events", *(f"device {device.device}" for device in devices))
    return Figure(bars.draw(drawing, rows), Table(drawing.title, head, cells))


def _overlaps(profile: Profile) -> Figure:
    rows, cells = [], []
    for device in profile.devices:
        beside = device.overlapped_seconds
        alone = device.communication_seconds - beside
        pieces = [
            (beside, "plain", f"beside compute {units.seconds(beside)}"),
            (alone, "excess", f"alone {units.seconds(alone)}"),
        ]
        value = units.seconds(device.communication_seconds)
        note = f"{units.seconds(beside)} beside compute, {units.seconds(alone)} alone"
        rows.append(bars.Row(f"device {device.device}", value, pieces, note))
        compute = units.seconds(device.compute_seconds)
        cells.append([f"device {device.device}", value, units.seconds(beside), compute])
    title = "Communication, beside compute and alone"
    if len(rows) > _MOST_DEVICES:
        rows = rows[:_MOST_DEVICES]
        title += f", of the first {_MOST_DEVICES} devices"
    drawing = Drawing(
        "profile-overlap",
        title,
        "; ".join(f"{row.label}: {row.note}" for row in rows),
        [("plain", "beside compute"), ("excess", "alone")],
    )
    head = ("Device", "Communication", "Beside compute", "Compute")
    return Figure(bars.draw(drawing, rows), Table(title, head, cells))


def _round_trip(profile: Profile) -> tuple[float, float]:
    """From the middle layout of the first device to its next, or to the end.

    The middle one, since the first steps of a profile are often slower.
    """
    first = profile.devices[0].device
    starts = [
        event.start
        for event in profile.events
        if event.device == first and event.is_exchange and event.stage == "layout"
    ]
    if not starts:
        return 0.0, float("inf")
    middle = (len(starts) - 1) // 2
    return starts[middle], [*starts, float("inf")][middle + 1]
