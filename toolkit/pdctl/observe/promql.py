"""Small pieces of PromQL."""


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
