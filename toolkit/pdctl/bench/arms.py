"""The arms of a comparison, and what each asks of the deployment."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from pd_connector.contract import Route
from pdctl.errors import PdctlError
from pdctl.spec import Spec


@dataclass(frozen=True)
class Arm:
    """One way of serving the same load.

    ``bidirectional`` None: as the spec has it. ``route``: the way that turns are meant to go, None:
    as the router chooses. ``asks``: the client asks for it, turn by turn, in a request header.
    ``names``: False where the client leaves the conversation's name out, so that nothing can be
    read back. ``pin``: the router is pinned to it in the spec.
    """

    name: str
    bidirectional: bool | None = None
    route: str | None = None
    asks: str | None = None
    names: bool = True
    pin: str | None = None
    url: str | None = None

    def described(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


_READBACK, _RECOMPUTE, _APPEND = (
    Route.READBACK.value,
    Route.RECOMPUTE.value,
    Route.APPEND.value,
)
KNOWN = {
    arm.name: arm
    for arm in (
        Arm("off", bidirectional=False),
        # What the article calls on: prefill reads, also where the router would know better.
        Arm("on", bidirectional=True, asks=_READBACK),
        Arm("auto", bidirectional=True),
        Arm(_RECOMPUTE, bidirectional=True, route=_RECOMPUTE, asks=_RECOMPUTE),
        Arm(_READBACK, bidirectional=True, route=_READBACK, asks=_READBACK),
        # No client may ask for this one: it takes time from running answers.
        Arm(_APPEND, bidirectional=True, route=_APPEND, pin=_APPEND),
    )
}


def arms_named(names: str) -> list[Arm]:
    """Of ``--arms``: names of :data:`KNOWN`, separated by commas.

    Raises:
        PdctlError: another name, or one twice.
    """
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in KNOWN:
            raise PdctlError(f"--arms: {name!r} is none of {', '.join(KNOWN)}", 2)
    if len(set(wanted)) != len(wanted):
        raise PdctlError("--arms: names one twice", 2)
    return [KNOWN[name] for name in wanted]


def spec_of(spec: Spec, arm: Arm) -> Spec:
    """The spec as the arm needs it. A route that the spec pins gives way."""
    kv, router = spec.kv_transfer, spec.router
    if arm.bidirectional is not None:
        kv = kv.model_copy(update={"bidirectional": arm.bidirectional})
        router = router.model_copy(update={"route": arm.pin or "auto"})
    return spec.model_copy(update={"kv_transfer": kv, "router": router})


def order(arms: list[Arm], repeats: int, rounds: int) -> list[tuple[Arm, int]]:
    """Every repeat of every arm, in the order they are run.

    Arms that differ in the bidirectional setting need the engines restarted, so their repeats
    stay together, in ``rounds`` rounds that go back and forth (A B | B A). Others alternate
    repeat by repeat, each time another arm first, so that drift meets all alike.
    """
    numbers = list(range(1, repeats + 1))
    if len({arm.bidirectional for arm in arms}) == 1:
        return [
            (arm, repeat)
            for repeat in numbers
            for arm in (*arms[(repeat - 1) % len(arms) :], *arms[: (repeat - 1) % len(arms)])
        ]
    rounds = min(rounds, repeats)
    planned = []
    for turn in range(rounds):
        share = numbers[turn * repeats // rounds : (turn + 1) * repeats // rounds]
        for arm in arms if turn % 2 == 0 else reversed(arms):
            planned += [(arm, repeat) for repeat in share]
    return planned
