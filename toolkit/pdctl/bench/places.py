"""What a run is made on: a deployment that pdctl brings up, or whatever answers at a URL."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pdctl.bench.arms import Arm, spec_of
from pdctl.bench.client import Target
from pdctl.bench.engines import EngineLeg
from pdctl.bench.load import Site
from pdctl.plan import Deployment, plan
from pdctl.spec import Spec


class Place(Protocol):
    """What a run is made on."""

    def prepare(self, arm: Arm) -> tuple[Site, bool]:
        """Bring it into the state that an arm needs: where to send, and whether the engines
        are freshly started."""

    def logs(self) -> dict[str, tuple[str, str]]:
        """Role and log text of each engine leg since its start, by leg."""

    def finish(self) -> None:
        """Leave it as it was."""


class UrlPlace:
    """Whatever answers at a URL."""

    def __init__(self, targets: dict[str, Target], legs: list[EngineLeg] | None = None) -> None:
        self._targets = targets
        self._legs = legs or []
        self._fresh = True

    def prepare(self, arm: Arm) -> tuple[Site, bool]:
        fresh, self._fresh = self._fresh, False
        return Site(self._targets[arm.name], self._legs), fresh

    def logs(self) -> dict[str, tuple[str, str]]:
        return {}

    def finish(self) -> None:
        pass


class DeploymentPlace:
    """A deployment on this machine, brought up by pdctl.

    Args:
        bring_up: makes the deployment run as planned; what runs already and fits stays.
        leg_log: text of a leg's log.
        take_down: called once at the end, unless it is to stay.
    """

    def __init__(
        self,
        spec: Spec,
        base: Path,
        bring_up: Callable[[Deployment], None],
        leg_log: Callable[[str], str],
        take_down: Callable[[], None] | None,
        attach: bool = False,
    ) -> None:
        self._spec = spec
        self._base = base
        self._bring_up = bring_up
        self._leg_log = leg_log
        self._take_down = take_down
        self._attach = attach
        self._running: Deployment | None = None

    def prepare(self, arm: Arm) -> tuple[Site, bool]:
        deployment = plan(spec_of(self._spec, arm), self._base)
        before = self._running
        if deployment != before:
            if not (self._attach and before is None and arm.bidirectional is None):
                self._bring_up(deployment)
            self._running = deployment
        fresh = before is None or before.engines != deployment.engines
        return self._site(deployment, arm), fresh

    def _site(self, deployment: Deployment, arm: Arm) -> Site:
        legs = [EngineLeg(leg.name, leg.role, leg.url) for leg in deployment.engines]
        target = Target(
            deployment.router.url,
            deployment.served_name,
            name_conversation=arm.names,
            route=arm.asks,
        )
        return Site(target, legs)

    def logs(self) -> dict[str, tuple[str, str]]:
        if self._running is None:
            return {}
        return {leg.name: (leg.role, self._leg_log(leg.name)) for leg in self._running.engines}

    def finish(self) -> None:
        if self._take_down is not None:
            self._take_down()
