"""The arms of a comparison, and what each asks of the deployment."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from pd_connector.contract import Route
from pdctl.errors import PdctlError
from pdctl.spec import Spec
from pdctl.spec.model import Router

ROUTE_PIN = "route"
"""Key of the spec's router section that pins the route."""


@dataclass(frozen=True)
class Arm:
    """One way of serving the same load.

    ``bidirectional`` and ``route`` None: as the spec has it. ``by_client``: the route is forced
    by what the client sends, since the router cannot pin it.
    """

    name: str
    bidirectional: bool | None = None
    route: str | None = None
    by_client: bool = False
    url: str | None = None

    def described(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def reads_back(self) -> bool:
        """Whether its later turns are expected to read decode's blocks."""
        if self.route is not None:
            return self.route == Route.READBACK.value
        return self.bidirectional is not False


ON = Arm("on", bidirectional=True)
OFF = Arm("off", bidirectional=False)


def arms_named(names: str) -> list[Arm]:
    """Of ``--arms``: on, off, recompute, readback, append, separated by commas.

    Raises:
        PdctlError: another name, or one twice.
    """
    can_pin = ROUTE_PIN in Router.model_fields
    known = {arm.name: arm for arm in (ON, OFF)} | {
        route.value: Arm(route.value, True, route.value, by_client=not can_pin) for route in Route
    }
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in known:
            raise PdctlError(f"--arms: {name!r} is none of {', '.join(known)}", 2)
    if len(set(wanted)) != len(wanted):
        raise PdctlError("--arms: names one twice", 2)
    return [known[name] for name in wanted]


def spec_of(spec: Spec, arm: Arm) -> Spec:
    """The spec as the arm needs it."""
    kv, router = spec.kv_transfer, spec.router
    if arm.bidirectional is not None:
        kv = kv.model_copy(update={"bidirectional": arm.bidirectional})
    if arm.route is not None and not arm.by_client:
        router = router.model_copy(update={ROUTE_PIN: arm.route})
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
