"""What a measurement says: seconds lost to each of four things, and to which most.

The four are measured apart and do not add up: a row that is padding may also be what
makes a rank the last one. Each is the seconds of one forward step that would go if this
one thing were perfect.
"""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Sequence

import numpy as np

from jax_ep.sizing import padding_amplification as amplification
from jax_ep.tools.measurement import Load, Measurement, Overlap

# Ranks whose slowest takes at most this much more than their mean are even.
EVEN = 0.05
# A rank that is last in this share of the steps stays last.
STAYS = 0.75

KINDS = ("bandwidth", "padding", "load", "overlap")

# A floor below this, far under the time, is latency: launches and round trips.
LATENCY_FLOOR = 50e-6
LATENCY_SHARE = 0.25

REMEDIES = {
    "bandwidth": "Fewer bytes (wire=BlockScaled, a narrower dtype), or more SMs "
    "(num_sms).",
    "latency": "More tokens in a call, or fewer calls: bytes are not what takes the "
    "time.",
    "padding": "A smaller expert_alignment, if the grouped product takes it.",
    "load": "Replicas of hot experts (plan_placement), or a balance loss or bias.",
    "overlap": "Work beside the exchange: a shared expert, num_chunks, or the start "
    "and done calls.",
}


@dataclasses.dataclass(frozen=True)
class Last:
    """Which rank's experts end last, and why.

    Attributes:
      times_last: `[R]`, steps in which each rank was last.
      stays: one rank is last in at least `STAYS` of the steps; None of a single step.
      last_is_busiest: share of the steps in which the last rank has the most rows.
      correlation: Pearson's, of rows and seconds over all steps and ranks; None where
        either does not vary.
      row_imbalance, time_imbalance: busiest over mean, less 1; the median step.
      case: "even": the ranks end together. "placement": the last rank stays, and has
        the most rows: place experts otherwise. "device": rows are even and times are
        not: look at the device and its path. "routing": the last rank changes, and the
        rows with it. "unclear": none of these; with one step, who stays cannot be told.
    """

    times_last: list[int]
    stays: bool | None
    last_is_busiest: float
    correlation: float | None
    row_imbalance: float
    time_imbalance: float
    case: str


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Of one measurement.

    Attributes:
      step_seconds: of the forward step that was measured; None without the overlap's
        programs.
      lost_seconds: by kind of `KINDS`; None where it was not measured.
      reasons: by kind, one sentence with its numbers.
      remedies: by kind, what would win those seconds back.
      is_latency: the exchanges' floors are so low that launches and round trips, not
        bytes, are what takes their time.
      unexplained_seconds: of the step, beyond its parts one after another; part of
        none of the four.
      dropped: rows that found no room over rows wanted, in all steps.
      held_back_by: the kind with the most seconds; None where all are zero or None.
      sentence: which of the four holds this run back, and by how much.
      amplification: processed rows over rows with a token, over all experts and steps.
      expert_amplification: `[E]`, the same of each expert; None without a row.
      last: None without the times of ranks.
    """

    step_seconds: float | None
    lost_seconds: dict[str, float | None]
    reasons: dict[str, str]
    remedies: dict[str, str]
    is_latency: bool
    unexplained_seconds: float
    dropped: float
    held_back_by: str | None
    sentence: str
    amplification: float
    expert_amplification: list[float | None]
    last: Last | None


def diagnose(measurement: Measurement) -> Diagnosis:
    """The four, and the one that holds the run back.

    Args:
      measurement: what `bench` wrote.

    Returns:
      A `Diagnosis`.
    """
    load, alignment = measurement.load, measurement.layer.expert_alignment
    found = {
        "bandwidth": _bandwidth(measurement),
        "padding": _padding(load, alignment, measurement.layer.capacity),
        "load": _load(load),
        "overlap": _overlap(measurement.overlap),
    }
    lost = {kind: seconds for kind, (seconds, _) in found.items()}
    reasons = {kind: reason for kind, (_, reason) in found.items()}
    overlap = measurement.overlap
    step = overlap.measured_seconds if overlap else None
    worst = max(KINDS, key=lambda kind: lost[kind] or 0)
    worst = worst if lost[worst] else None
    remedies = {kind: REMEDIES[kind] for kind in KINDS}
    is_latency = _is_latency(measurement)
    if is_latency:
        remedies["bandwidth"] = REMEDIES["latency"]
    unexplained = 0.0
    if overlap is not None:
        unexplained = max(0.0, overlap.measured_seconds - overlap.serial_seconds)
    dropped = int(np.sum(load.dropped_rows))
    dropped /= max(1, int(np.sum(load.rank_rows)) + dropped)
    sentence = _sentence(worst, lost, reasons, step, is_latency)
    if dropped:
        sentence += f" {dropped:.1%} of the rows found no room and were dropped."
    return Diagnosis(
        step_seconds=step,
        lost_seconds=lost,
        reasons=reasons,
        remedies=remedies,
        is_latency=is_latency,
        unexplained_seconds=unexplained,
        dropped=dropped,
        held_back_by=worst,
        sentence=sentence,
        amplification=amplification(np.ravel(load.expert_rows).tolist(), alignment),
        expert_amplification=_by_expert(load.expert_rows, alignment),
        last=who_is_last(load.rank_rows, load.rank_seconds)
        if load.rank_seconds
        else None,
    )


def padded(rows: int, alignment: int) -> int:
    """Rows of a group of `rows` that ends on a multiple of `alignment`."""
    return -(-rows // alignment) * alignment


def overlapped_seconds(communication: float, compute: float, tail: float = 0.0):
    """Of communication beside compute: the slower of both, and what cannot overlap.

    40 beside 60 ms are 60; if both slow each other down to 70 and 80, 80 and the tail.
    """
    return max(communication, compute) + tail


def hidden_share(overlap: Overlap) -> float | None:
    """Of what could overlap, how much did: 1 is ideal, 0 serial, below 0 slower still.

    None where there is nothing to hide.
    """
    possible = overlap.serial_seconds - overlap.ideal_seconds
    if possible <= 0:
        return None
    return (overlap.serial_seconds - overlap.measured_seconds) / possible


def who_is_last(
    rank_rows: Sequence[Sequence[int]], rank_seconds: Sequence[Sequence[float]]
) -> Last:
    """Pairs every rank's rows with its time, step by step.

    Args:
      rank_rows: `[steps, R]`, rows with a token.
      rank_seconds: `[steps, R]`, of each rank's experts.
    """
    rows, seconds = np.array(rank_rows, float), np.array(rank_seconds, float)
    last, busiest = seconds.argmax(1), rows.max(1)
    counts = Counter(last.tolist())
    is_busiest = float(np.mean(rows[np.arange(len(last)), last] == busiest))
    stays = None
    if len(last) > 1:
        stays = max(counts.values()) >= STAYS * len(last)
    row_imbalance, time_imbalance = _imbalance(rows), _imbalance(seconds)
    if time_imbalance <= EVEN:
        case = "even"
    elif row_imbalance <= EVEN:
        case = "device"
    elif stays is None or is_busiest < STAYS:
        case = "unclear"
    else:
        case = "placement" if stays else "routing"
    varies = rows.std() > 0 and seconds.std() > 0
    return Last(
        times_last=[counts[rank] for rank in range(rows.shape[1])],
        stays=stays,
        last_is_busiest=is_busiest,
        correlation=float(np.corrcoef(rows.ravel(), seconds.ravel())[0, 1])
        if varies
        else None,
        row_imbalance=row_imbalance,
        time_imbalance=time_imbalance,
        case=case,
    )


def _imbalance(values: np.ndarray) -> float:
    """Largest over mean, less 1, of the median step."""
    mean = values.mean(1)
    over = np.divide(values.max(1), mean, out=np.ones_like(mean), where=mean > 0)
    return float(np.median(over)) - 1


def _by_expert(expert_rows, alignment: int) -> list[float | None]:
    return [
        amplification(counts, alignment) if sum(counts) else None
        for counts in zip(*expert_rows, strict=True)
    ]


def _with_floors(measurement: Measurement):
    return [
        exchange
        for exchange in measurement.exchanges
        if exchange.stage in ("dispatch", "combine")
        and exchange.floor_seconds is not None
    ]


def _is_latency(measurement: Measurement) -> bool:
    exchanges = _with_floors(measurement)
    return bool(exchanges) and all(
        (each.floor_seconds or 0) < min(LATENCY_FLOOR, LATENCY_SHARE * each.seconds)
        for each in exchanges
    )


def _bandwidth(measurement: Measurement) -> tuple[float | None, str]:
    exchanges = _with_floors(measurement)
    if not exchanges:
        return None, "Not measured: no ceilings."
    seconds = sum(exchange.seconds for exchange in exchanges)
    floor = sum(exchange.floor_seconds or 0 for exchange in exchanges)
    names = " and ".join(exchange.stage for exchange in exchanges)
    takes = "take" if len(exchanges) > 1 else "takes"
    if _is_latency(measurement):
        return max(0.0, seconds - floor), (
            f"{names} {takes} {duration(seconds)}, and their bytes need no more than "
            f"{duration(floor)}: the rest is latency, of launches and round trips."
        )
    return max(0.0, seconds - floor), (
        f"{names} {takes} {duration(seconds)}; at the measured rates of this machine "
        f"their bytes need {duration(floor)}, {floor / seconds:.0%} of that."
    )


def _padding(load: Load, alignment: int, capacity: int) -> tuple[float | None, str]:
    factor = amplification(np.ravel(load.expert_rows).tolist(), alignment)
    reason = f"Groups padded to multiples of {alignment} make {factor:.2f} rows of one"
    if alignment == 1:
        return 0.0, "Groups are not aligned (A = 1): there are no padding rows in them."
    if not load.rank_seconds:
        return None, f"{reason}; the experts' time was not measured."
    lost = []
    for counts, seconds in zip(load.expert_rows, load.rank_seconds, strict=True):
        groups = np.array(counts).reshape(len(seconds), -1)
        rows = groups.sum(1)
        whole = np.minimum(padded_rows(groups, alignment), max(capacity, 1))
        share = np.maximum(0, whole - rows) / np.maximum(whole, 1)
        last = int(np.argmax(seconds))
        lost.append(float(share[last] * seconds[last]))
    median = statistics.median(lost)
    return median, (
        f"{reason}; that share of the slowest rank's experts' time is "
        f"{duration(median)}."
    )


def most_often_last(last: Last) -> str:
    """Which rank is last most often, or that several are equally often."""
    most, steps = max(last.times_last), sum(last.times_last)
    ranks = [rank for rank, times in enumerate(last.times_last) if times == most]
    if steps == 1:
        return f"rank {ranks[0]} is last"
    if len(ranks) == 1:
        return f"rank {ranks[0]} is last in {most} of {steps} steps"
    return f"{len(ranks)} ranks are last equally often, each in {most} of {steps} steps"


def padded_rows(groups: np.ndarray, alignment: int) -> np.ndarray:
    """`[R]` rows with padding, of `[R, L]` rows."""
    return (-(-groups // alignment) * alignment).sum(1)


def _load(load: Load) -> tuple[float | None, str]:
    if not load.rank_seconds:
        return None, "Not measured: no times of the ranks' experts."
    slowest = statistics.median(max(step) for step in load.rank_seconds)
    mean = statistics.median(statistics.mean(step) for step in load.rank_seconds)
    lost = statistics.median(
        max(step) - statistics.mean(step) for step in load.rank_seconds
    )
    last = who_is_last(load.rank_rows, load.rank_seconds)
    which = most_often_last(last)
    meaning = {
        "even": "the ranks end together",
        "placement": f"{which} and has the most rows: placement decides",
        "device": f"{which}, with rows as even as {last.row_imbalance:.0%}: "
        "look at the device and its path",
        "routing": "the last rank changes, and the rows with it: routing decides",
        "unclear": f"{which}, and has the most rows in {last.last_is_busiest:.0%} "
        "of them: neither rows nor placement explain it",
    }[last.case]
    if last.case == "unclear" and last.stays is None:
        meaning = f"{which}; one step cannot tell whether it stays"
    return lost, (
        f"The slowest rank's experts take {duration(slowest)}, the mean "
        f"{duration(mean)}; {meaning}."
    )


def _overlap(overlap: Overlap | None) -> tuple[float | None, str]:
    if overlap is None:
        return None, "Not measured."
    # No more than could be hidden: what a step takes beyond its parts, overlap would
    # not win back.
    could = max(0.0, overlap.serial_seconds - overlap.ideal_seconds)
    lost = min(max(0.0, overlap.measured_seconds - overlap.ideal_seconds), could)
    share = hidden_share(overlap)
    if share is None:
        hidden = "nothing could overlap"
    elif share < -0.005:
        excess = overlap.measured_seconds - overlap.serial_seconds
        hidden = (
            f"none of that happened, and {duration(excess)} beyond that are unexplained"
        )
    elif share < 0.005:
        hidden = "none of that happened"
    elif share > 1:
        hidden = (
            "all of that happened; the times of the parts vary by more than the rest"
        )
    else:
        hidden = f"{share:.0%} of that happened"
    return lost, (
        f"A step takes {duration(overlap.measured_seconds)}, one after another "
        f"{duration(overlap.serial_seconds)}, with full overlap "
        f"{duration(overlap.ideal_seconds)}: {hidden}."
    )


def _sentence(worst, lost, reasons, step: float | None, is_latency: bool) -> str:
    if worst is None:
        if all(seconds is None for seconds in lost.values()):
            return "None of the four was measured."
        return "None of what was measured holds this run back."
    share = f", {lost[worst] / step:.0%} of a step of {duration(step)}" if step else ""
    missing = [kind for kind in KINDS if lost[kind] is None]
    unknown = f" Not measured: {', '.join(missing)}." if missing else ""
    name = "latency" if worst == "bandwidth" and is_latency else worst
    return (
        f"{name.capitalize()} holds this run back most: {duration(lost[worst])}"
        f"{share}. {reasons[worst]}{unknown}"
    )


def duration(seconds: float) -> str:
    """Three figures in the fitting unit: 987 µs, 2.00 ms."""
    size = abs(seconds)
    # What rounding makes a thousand belongs to the next unit, as in page/units.py.
    unit, scale = ("s", 1.0) if size >= 0.9995 else ("ms", 1e-3)
    if size < 0.9995e-3:
        unit, scale = "µs", 1e-6
    value = seconds / scale
    if abs(value) >= 1000:
        return f"{value:.0f} {unit}"
    return f"{value:#.3g}".rstrip(".") + f" {unit}"
