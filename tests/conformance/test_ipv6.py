"""Engines on IPv6 addresses: handles carry them as they are."""

from pathlib import Path

import pytest

from tests.conformance.conftest import running_rig


def test_a_conversation_over_ipv6(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    config = request.config
    if config.getoption("--router-url", default=None):
        pytest.skip("run the kit with --engine-host ::1 and the router's URL")
    with running_rig(config, tmp_path, "stock", "::1") as rig:
        chat = rig.chat()
        for _ in range(3):
            assert chat.say().status == 200
        assert rig.handovers >= 3
        assert rig.readbacks == 2
        assert rig.violations == []
