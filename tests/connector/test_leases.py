"""The lease table of a decode engine, at a clock of its own."""

from collections.abc import Sequence

import pytest

from pd_connector.leases import Leases

TTL = 480.0


class Table:
    def __init__(self) -> None:
        self.now = 1000.0
        self.leases = Leases(clock=lambda: self.now, claim_seconds=30, margin=5)

    def pin(self, turn: str, blocks: Sequence[int] = (1, 2, 3), ttl: float = TTL) -> None:
        self.leases.pin(turn, blocks, 300, self.now + ttl)

    def left(self) -> dict[str, float]:
        return {row["id"]: row["seconds_left"] for row in self.leases.turns()}


@pytest.fixture
def table() -> Table:
    return Table()


def test_a_released_turn_leaves_once(table: Table) -> None:
    table.pin("a")
    assert table.leases.release(["a", "b"], "released") == {"a": "released", "b": "unknown"}
    commands = table.leases.commands()
    assert commands is not None and commands.release == {"a"}
    assert table.leases.commands() is None
    assert table.leases.release(["a"], "released") == {"a": "released"}
    assert table.leases.commands() is None
    assert table.leases.held() == (1, 3)
    assert table.leases.ended("a") == "released"
    assert table.leases.held() == (0, 0)
    assert table.leases.ended("a") is None


def test_a_turn_is_not_freed_while_it_is_read(table: Table) -> None:
    table.pin("a")
    assert table.leases.claim("a", "reader").granted
    table.leases.commands()
    assert table.leases.release(["a"], "released") == {"a": "reading"}
    assert table.leases.make_room(3, len) == 0
    assert table.leases.commands() is None
    assert table.leases.ended("a") == "read"


def test_a_release_during_a_read_that_never_ends_is_made_up_for(table: Table) -> None:
    table.pin("a")
    table.leases.claim("a", "reader")
    table.leases.release(["a"], "released")
    table.now += 31
    commands = table.leases.commands()
    assert commands is not None and commands.release == {"a"}
    assert table.leases.ended("a") == "released"


def test_a_turn_is_read_once_at_a_time(table: Table) -> None:
    table.pin("a")
    assert table.leases.claim("a", "one").granted
    assert table.leases.claim("a", "two") == (False, 0.0, "claimed")
    assert not table.leases.unclaim("a", "two")
    assert table.leases.unclaim("a", "one")
    assert table.leases.claim("a", "two").granted
    assert table.leases.ended("a") == "read"
    assert table.leases.claim("a", "one") == (False, 0.0, "read")


def test_a_reader_renews_its_claim(table: Table) -> None:
    table.pin("a", ttl=40)
    table.leases.claim("a", "reader")
    table.leases.release(["a"], "released")
    table.now += 20
    assert table.leases.claim("a", "reader").granted
    assert table.leases.claim("a", "other").reason == "claimed"
    table.now += 29
    assert table.left()["a"] == 6.0
    table.now += 1
    commands = table.leases.commands()
    assert commands is not None and commands.release == {"a"}
    assert table.leases.claim("a", "reader").reason == "released"


def test_a_claim_outlives_the_deadline(table: Table) -> None:
    table.pin("a", ttl=6)
    assert table.leases.claim("a", "reader").granted
    commands = table.leases.commands()
    assert commands is not None and commands.extend == {"a": 35.0}


def test_a_turn_about_to_expire_is_not_claimed(table: Table) -> None:
    table.pin("a", ttl=5)
    assert table.leases.claim("a", "reader").reason == "expiring"
    table.now += 5
    assert table.leases.ended("a") == "expired"
    assert table.leases.claim("a", "reader").reason == "expired"
    assert table.leases.claim("b", "reader").reason == "unknown"


def test_a_reader_that_dies_is_forgotten(table: Table) -> None:
    table.pin("a")
    table.leases.claim("a", "dead")
    table.now += 30
    assert table.leases.claim("a", "next").granted


def test_a_lease_is_renewed_and_never_shortened(table: Table) -> None:
    table.pin("a")
    assert table.leases.renew({"a": 1000, "b": 9}) == {"a": 1000.0}
    commands = table.leases.commands()
    assert commands is not None and commands.extend == {"a": 1000.0}
    assert table.leases.renew({"a": 10}) == {"a": 1000.0}
    table.leases.release(["a"], "released")
    assert table.leases.renew({"a": 5000}) == {}
    commands = table.leases.commands()
    assert commands is not None and commands.extend == {}


def test_the_longest_idle_turn_goes_first(table: Table) -> None:
    for number, turn in enumerate("abc"):
        table.pin(turn, range(number * 10, number * 10 + 4))
        table.now += 1
    assert table.leases.claim("a", "me").granted and table.leases.unclaim("a", "me")
    # Not a use: else a turn that pauses would outlast those that go on.
    table.leases.renew({"b": 1000})
    assert table.leases.make_room(5, len) == 8
    commands = table.leases.commands()
    assert commands is not None and commands.release == {"b", "c"}
    # What is on its way out counts.
    assert table.leases.make_room(5, len) == 8
    assert table.leases.commands() is None
    assert set(table.left()) == {"a"}


def test_blocks_that_turns_share_are_counted_once(table: Table) -> None:
    table.pin("a", (1, 2))
    table.pin("b", (2, 3))
    assert table.leases.held() == (2, 3)
    table.leases.ended("a")
    assert table.leases.held() == (1, 2)
