"""Numbers as a reader wants them: three digits and a unit."""

import math

_SPACE = "\u00a0"  # A number and its unit stay on one line.


def seconds(value: float) -> str:
    """0.000987 is 987 µs."""
    return _scaled(value, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")))


def size(value: float) -> str:
    """321e6 is 321 MB: decimal prefixes, as rates have them."""
    return _scaled(
        value, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
    )


def rate(value: float) -> str:
    """352e9 is 352 GB/s."""
    return size(value) + "/s"


def percent(value: float) -> str:
    """0.0123 is 1.2%, 0.92 is 92%."""
    digits = 1 if 0 < abs(value) < 0.0995 else 0
    return f"{value:.{digits}%}"


def times(value: float) -> str:
    """3.0 is 3.00×."""
    return f"{_digits(value)}×"


def count(value: float) -> str:
    """65536 is 65,536."""
    return f"{value:,.0f}"


def ticks(top: float, most: int = 5) -> list[float]:
    """Round values from 0 to at most `top`, no more than `most` of them."""
    if not top > 0:
        return [0.0]
    step = 10.0 ** math.floor(math.log10(top / most))
    for factor in (1, 2, 2.5, 5, 10, 20):
        if int(top / (step * factor) + 1e-9) + 1 <= most:
            step *= factor
            break
    return [step * i for i in range(int(top / step + 1e-9) + 1)]


def _scaled(value: float, units: tuple) -> str:
    if value == 0:
        return f"0{_SPACE}{units[-1][1] if units[-1][1] == 'B' else 's'}"
    for scale, unit in units:
        # 999.7 µs is 1.00 ms: what rounding makes a thousand belongs to the next unit.
        if abs(value) >= scale * 0.9995:
            return f"{_digits(value / scale)}{_SPACE}{unit}"
    scale, unit = units[-1]
    return f"{value / scale:.2g}{_SPACE}{unit}"


def _digits(value: float) -> str:
    for bound, digits in ((9.995, 2), (99.95, 1)):
        if abs(value) < bound:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"
