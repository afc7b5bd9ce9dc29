"""Reports of failures through the doctor: the right cause first, and silence over routine."""

import pytest

from pdctl.doctor.checks import ALL
from pdctl.doctor.run import Diagnosis
from tests.doctor.reports import Case, cases, diagnosis, fits

RIGHT_SHARE = 0.95
TITLES = {check.code: check.title for check in ALL}
Diagnosed = dict[str, list[tuple[Case, Diagnosis]]]


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory: pytest.TempPathFactory) -> Diagnosed:
    """Every case of every folder, and what the doctor says of its bundle."""
    root = tmp_path_factory.mktemp("bundles")
    return {
        folder: [
            (case, diagnosis(case, root / folder / str(number)))
            for number, case in enumerate(cases(folder))
        ]
        for folder in ("cases", "variants", "quiet")
    }


@pytest.mark.parametrize(("folder", "least"), [("cases", 59), ("variants", 150)])
def test_the_right_category_and_cause_come_first(
    folder: str, least: int, diagnosed: Diagnosed
) -> None:
    """The table is printed with ``pytest -s``."""
    right, worst, rows = 0, 0, []
    for case, found in diagnosed[folder]:
        good, extra = fits(case, found)
        right += good
        worst = max(worst, len(extra))
        first = found.findings[0].check.code if found.findings else "nothing"
        rows.append(
            f"{'ok   ' if good else 'WRONG'} {case.category:<19} {case.finding} "
            f"{TITLES.get(case.finding or '', '?'):<56} {case.title}"
            + ("" if good else f" (first: {first})")
            + (f" (also: {', '.join(extra)})" if extra else "")
        )
    count = len(rows)
    rows.append(f"{folder}: {right} of {count} right, at most {worst} wrong errors beside a cause")
    table = "\n".join(rows)
    print(f"\n{table}")
    assert count >= least
    assert right >= RIGHT_SHARE * count, table
    assert worst <= 1, table


def test_routine_evidence_gives_no_warning(diagnosed: Diagnosed) -> None:
    alarms = {
        case.title: [each.check.code for each in found.findings if each.severity != "info"]
        for case, found in diagnosed["quiet"]
    }
    assert {title: codes for title, codes in alarms.items() if codes} == {}
    assert len(alarms) >= 25


def test_no_check_fails_on_any_of_it(diagnosed: Diagnosed) -> None:
    for case, found in (each for folder in diagnosed.values() for each in folder):
        assert [
            each.missing for each in found.unknown if "the check failed" in each.missing
        ] == [], case.title


def test_every_category_has_cases_in_both_sets() -> None:
    categories = {check.category.value for check in ALL}
    assert {case.category for case in cases("cases")} == categories
    assert {case.category for case in cases("variants")} == categories


def test_a_finding_names_evidence_cause_and_fix(diagnosed: Diagnosed) -> None:
    for case, found in (*diagnosed["cases"], *diagnosed["variants"]):
        for each in found.findings:
            assert each.finding.evidence, (case.title, each.check.code)
            assert len(each.finding.cause) > 40, (case.title, each.check.code)
            assert len(each.finding.fix) > 20, (case.title, each.check.code)
