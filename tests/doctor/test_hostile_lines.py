"""A line made to be slow to match costs what its length says: no pattern looks on without end."""

import re

import pytest

from pdctl.doctor.checks import ALL
from pdctl.doctor.model import Pattern
from pdctl.doctor.run import patterns

EVERY = {each.name: each for each in patterns(ALL)}


@pytest.mark.parametrize("pattern", EVERY.values(), ids=EVERY)
def test_a_pattern_skips_a_bounded_number_of_characters(pattern: Pattern) -> None:
    """``.*`` before anything else would be tried from every place where the rest fits."""
    assert not re.search(r"\.[*+]\??(?!\)?$)", pattern.regex or ""), pattern.regex
