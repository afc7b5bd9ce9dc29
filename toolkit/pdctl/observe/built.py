"""What is checked in below ``dashboards/``, made anew."""

import yaml

from pdctl.observe.alerts import rules
from pdctl.observe.boards import BOARDS
from pdctl.observe.conditions import Settings
from pdctl.observe.grafana import dashboard_json


def built_files() -> dict[str, str]:
    """Text by file name: a JSON per dashboard, and the rules with their default windows."""
    made = {f"{board.uid}.json": dashboard_json(board) for board in BOARDS}
    made["alerts.yaml"] = yaml.safe_dump(rules(Settings()), sort_keys=False, width=1000)
    return made
