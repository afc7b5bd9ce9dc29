"""Small pieces of PromQL."""

import re
from collections.abc import Mapping

SELECTOR = re.compile(
    r"(?<![\w:$\"'])((?:pd_|vllm:)[a-z0-9_]+|up)(?:\{([^}]*)\})?(?![\w(])|\{(__name__[^}]*)\}"
)
"""A metric's name and its matchers, or matchers that have the name among them."""


def select(name: str, *matchers: str) -> str:
    """``name{a="b",...}``; a matcher is written as PromQL has it."""
    return f"{name}{{{','.join(matchers)}}}" if matchers else name


def increase(name: str, window: str, *matchers: str, by: str = "deployment") -> str:
    return f"sum by ({by}) (increase({select(name, *matchers)}[{window}]))"


def rate(name: str, window: str, *matchers: str, by: str = "deployment") -> str:
    return f"sum by ({by}) (rate({select(name, *matchers)}[{window}]))"


def total(name: str, *matchers: str, by: str = "deployment") -> str:
    return f"sum by ({by}) ({select(name, *matchers)})"


def quantile(share: float, name: str, window: str, *matchers: str, by: str = "") -> str:
    """A quantile of a histogram; ``by`` are the labels that stay."""
    labels = ", ".join(filter(None, ("le", by)))
    buckets = rate(f"{name}_bucket", window, *matchers, by=labels)
    return f"histogram_quantile({share:g}, {buckets})"


def mean(name: str, window: str, *matchers: str, by: str = "deployment") -> str:
    """Mean of a histogram's observations."""
    return f"{rate(f'{name}_sum', window, *matchers, by=by)} / " + rate(
        f"{name}_count", window, *matchers, by=by
    )


def span(seconds: float) -> str:
    """A PromQL duration of this many seconds, in its largest whole units."""
    milliseconds = round(seconds * 1000)
    parts = []
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, milliseconds = divmod(milliseconds, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def labelled(labels: Mapping[str, str]) -> str:
    """A vector of one series, 1, with these labels."""
    expr = "vector(1)"
    for name, value in labels.items():
        expr = f'label_replace({expr}, "{name}", "{_literal(value)}", "", "")'
    return expr


def within(expr: str, label: str, value: str) -> str:
    """A query whose every selector has one more matcher."""
    more = f'{label}="{_escaped(value)}"'

    def narrowed(match: re.Match[str]) -> str:
        matchers = ",".join(filter(None, (match[2] or match[3], more)))
        return f"{match[1] or ''}{{{matchers}}}"

    return SELECTOR.sub(narrowed, expr)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')


def _literal(value: str) -> str:
    """A replacement that stands for itself."""
    return _escaped(value.replace("$", "$$"))
