"""What takes the place of a required value that is missing or wrong, so that the rules between the
other values can still be checked. None of them makes a rule fail by itself."""

from typing import Any

from pdctl.spec.faults import Where
from pdctl.spec.model import MOST

HOST = "stand-in.invalid"
MAX_MODEL_LEN = MOST


def stand_in(where: Where, count: int) -> Any:
    """A value for this place, or None where the default does.

    Args:
        count: makes ports differ from one another.
    """
    if isinstance(where[-1], int):
        return _leg(count) if where[-2] == "legs" else "stand-in"
    match where:
        case ("name",):
            return "stand-in"
        case ("model",):
            return {"id": "stand-in", "max_model_len": MAX_MODEL_LEN}
        case ("model", "id"):
            return "stand-in"
        case ("model", "max_model_len"):
            return MAX_MODEL_LEN
        case ("prefill" | "decode",):
            return {"legs": [_leg(count)]}
        case ("prefill" | "decode", "legs"):
            return [_leg(count)]
        case (_, "legs", int(), "host"):
            return HOST
        case (_, "legs", int(), "port"):
            return 40000 + count % 1000
        case (_, "legs", int(), "side_channel_port"):
            return 41000 + count % 1000
    return None


def _leg(count: int) -> dict[str, Any]:
    return {"host": HOST, "port": 40000 + count % 1000, "side_channel_port": 41000 + count % 1000}
