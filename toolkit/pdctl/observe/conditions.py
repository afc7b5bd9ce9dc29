"""What alerts fire on: PromQL for a deployment's windows, objectives and expectations.

Ratios are looked at over two windows, so that a short burst does not page and an ended trouble
stops to: the short one is :attr:`Settings.window`, the long one twelve times as long.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from pd_connector import contract, telemetry
from pd_connector.contract import Outcome
from pdctl.observe.promql import increase, labelled, select, span, total

JOB = "pdctl"
"""Name of the scrape job of all legs."""
EXPECTED = "pd_expected_info"
"""Recorded by a deployment's own rules: 1, with what its spec says as labels."""

PREFILL, DECODE = 'role="prefill"', 'role="decode"'
ENGINES = 'role=~"prefill|decode"'
WITH_HANDLE = f'outcome!~"{Outcome.MISS.value}|{Outcome.DISABLED.value}"'
REMOTE = f'source="{contract.SOURCE_EXTERNAL_KV}"'
DEFAULT_PLAYBOOKS = "http://127.0.0.1:9090/consoles"


@dataclass(frozen=True)
class Settings:
    """What a spec says about alerts.

    Attributes:
        window: seconds of the short window.
        ttft_slo: seconds; a bucket of the TTFT histogram.
        ttft_target: share of streamed turns that must have their first event within ``ttft_slo``.
        playbooks: URL below which the pages ``SLUG.html`` are.
        expected: labels of :data:`EXPECTED`; None where no deployment is known.
        recorded: Prometheus has :data:`EXPECTED`; else conditions carry it themselves.
    """

    window: float = 300.0
    ttft_slo: float = 2.5
    ttft_target: float = 0.95
    playbooks: str = DEFAULT_PLAYBOOKS
    expected: dict[str, str] | None = field(default=None)
    recorded: bool = True

    @property
    def short(self) -> str:
        return span(self.window)

    @property
    def long(self) -> str:
        return span(self.window * 12)

    @property
    def interval(self) -> float:
        """Seconds between two looks at a condition."""
        return min(self.window / 5, 30.0)

    def expectation(self, matcher: str = "") -> str:
        """What the spec says, as a vector: recorded by Prometheus, or in the condition itself.

        Args:
            matcher: which specs expect anything; a condition that carries its own is not made
                for others.
        """
        if self.recorded:
            return select(EXPECTED, matcher) if matcher else EXPECTED
        return labelled(self.expected or {})


def reuse_stopped(s: Settings) -> str:
    sent = increase(telemetry.ROUTER_HANDLES_SENT.name, s.short)
    read = increase(contract.ENGINE_PROMPT_TOKENS_BY_SOURCE, s.short, PREFILL, REMOTE)
    return f"({sent} > 2)\nunless on (deployment) ({read} > 0)"


def _share(s: Settings, part: str, whole: str, limit: float) -> str:
    """A share of turns above a limit in both windows."""

    def over(window: str) -> str:
        turns = telemetry.ROUTER_TURNS.name
        matchers = [whole] if whole else []
        return (
            f"({increase(turns, window, part)} / {increase(turns, window, *matchers)} > {limit:g})"
        )

    return f"{over(s.short)}\nand {over(s.long)}"


def always_miss(s: Settings) -> str:
    share = _share(s, f'outcome="{Outcome.MISS.value}"', "", 0.95)
    turns = increase(telemetry.ROUTER_TURNS.name, s.long)
    on = select(telemetry.ROUTER_INFO.name, 'bidirectional="on"')
    return f"{share}\nand ({turns} > 20)\nand on (deployment) {on}"


def handles_expire(s: Settings) -> str:
    return _share(s, f'outcome="{Outcome.EXPIRED.value}"', WITH_HANDLE, 0.05)


def transfer_failures(s: Settings) -> str:
    def over(window: str) -> str:
        failed = increase(contract.ENGINE_NIXL_FAILED, window)
        good = increase(contract.ENGINE_NIXL_TRANSFERS, window)
        return f"({failed} / ({failed} + {good}) > 0.01)"

    return f"{over(s.short)}\nand {over(s.long)}"


def other_provider(s: Settings) -> str:
    info = telemetry.ENGINE_INFO.name
    named = s.expectation('provider!=""')
    return (
        f"({info} and on (deployment) {named})\nunless on (deployment, provider) {s.expectation()}"
    )


def disagree(s: Settings) -> str:
    names = f"{telemetry.ENGINE_INFO.name}|{telemetry.ROUTER_INFO.name}"
    told = f'{{__name__=~"{names}"}} or {s.expectation()}'
    values = f"group by (deployment, bidirectional) ({told})"
    return f"count by (deployment) ({values}) > 1"


def pinned_share(limit: float) -> Callable[[Settings], str]:
    def expr(s: Settings) -> str:
        pinned = total(telemetry.ENGINE_PINNED_BLOCKS.name, DECODE, by="deployment, leg")
        blocks = total(telemetry.ENGINE_BLOCKS.name, DECODE, by="deployment, leg")
        return f"{pinned} / {blocks} > {limit:g}"

    return expr


def crowded_out(s: Settings) -> str:
    """Decode's connector frees the longest idle turns while memory is short."""

    def over(window: str) -> str:
        by, ended = "deployment, leg", telemetry.ENGINE_PINS_ENDED.name
        short = increase(ended, window, DECODE, 'reason="high_water"', by=by)
        return f"({short} / {increase(ended, window, DECODE, by=by)} > 0.1)"

    return f"{over(s.short)}\nand {over(s.long)}"


def _slow_share(s: Settings, window: str) -> str:
    name = telemetry.ROUTER_TTFT.name
    within = increase(f"{name}_bucket", window, f'le="{float(s.ttft_slo)}"')
    return f"1 - {within} / {increase(f'{name}_count', window)}"


def ttft_burns(burn: float, short: float, long: float) -> Callable[[Settings], str]:
    """The error budget burns ``burn`` times as fast as it may; windows count short windows."""

    def expr(s: Settings) -> str:
        limit = min(burn * (1 - s.ttft_target), 0.99)
        first, second = (_slow_share(s, span(s.window * count)) for count in (short, long))
        return f"({first} > {limit:.6g})\nand ({second} > {limit:.6g})"

    return expr


def map_full(s: Settings) -> str:
    """The map is bounded by the number of its handles and by their bytes."""

    def over(used: str, limit: str) -> str:
        by = "deployment, instance"
        return f"({total(used, by=by)} / {total(limit, by=by)} > 0.9)"

    handles = over(telemetry.ROUTER_HANDLES_HELD.name, telemetry.ROUTER_HANDLES_LIMIT.name)
    memory = over(telemetry.ROUTER_HANDLES_BYTES.name, telemetry.ROUTER_HANDLES_BYTES_LIMIT.name)
    return f"{handles}\nor {memory}"


def silent_connector(s: Settings) -> str:
    ours = s.expectation('connector="pdctl"')
    return (
        f'(up{{job="{JOB}",{ENGINES}}} == 1)\n'
        f"and on (deployment) {ours}\n"
        f"unless on (deployment, leg) {telemetry.ENGINE_INFO.name}"
    )
