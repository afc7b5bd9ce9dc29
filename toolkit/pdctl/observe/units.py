"""Numbers as people read them, by Grafana's ids of units."""

import math

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_DECIMAL = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def shown(value: float, unit: str) -> str:
    """A value with its unit."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "∞"
    if unit == "s":
        return _seconds(value)
    if unit == "percentunit":
        return f"{_digits(value * 100)} %"
    if unit == "bytes":
        return _scaled(value, _BYTES)
    if unit == "Bps":
        return f"{_scaled(value, ((1e9, 'GB'), (1e6, 'MB'), (1e3, 'kB'), (1, 'B')))}/s"
    if unit == "reqps":
        return f"{_digits(value)}/s"
    if unit == "none" and float(value).is_integer():
        return f"{int(value):,}".replace(",", "\u202f")
    return _short(value)


def _seconds(value: float) -> str:
    if value == 0:
        return "0 s"
    if abs(value) >= 120:
        return f"{_digits(value / 60)} min"
    for size, name in _SECONDS:
        if abs(value) >= size:
            return f"{_digits(value / size)} {name}"
    return f"{_digits(value * 1e6)} µs"


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    for size, name in steps:
        if abs(value) >= size:
            return f"{_digits(value / size)} {name}"
    return f"{_digits(value)} {steps[-1][1]}"


def _short(value: float) -> str:
    for size, name in _DECIMAL:
        if abs(value) >= size:
            return f"{_digits(value / size)}{name}"
    return _digits(value)


def _digits(value: float) -> str:
    """Three significant digits, never in powers of ten."""
    if value == 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(places, 9)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
