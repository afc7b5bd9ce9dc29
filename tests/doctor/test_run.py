"""How checks are run: premises, causes over consequences, unknown, and a check that fails."""

from collections.abc import Iterator

import pytest

from pdctl.doctor.checks import ALL
from pdctl.doctor.evidence.facts import Command, Evidence, LegEvidence
from pdctl.doctor.model import Answer, Category, Check, Finding, Severity, Unknown
from pdctl.doctor.run import diagnose

EVIDENCE = Evidence((LegEvidence("prefill-0", "prefill", commands=(Command("x", "true", ""),)),))


def check(code: str, *answers: Answer, severity: Severity = "error", **more: object) -> Check:
    def run(evidence: Evidence) -> Iterator[Answer]:
        yield from answers

    return Check(
        code=code,
        title=f"title of {code}",
        category=Category.KV_EXPIRY,
        severity=severity,
        playbook="x",
        run=run,
        **more,  # type: ignore[arg-type]
    )


def finding(leg: str = "prefill-0", explains: tuple[str, ...] = ()) -> Finding:
    return Finding(leg, "certain", (), "cause", "fix", explains=explains)


def codes(reported: object) -> list[str]:
    return [each.check.code for each in reported]  # type: ignore[attr-defined]


def test_a_cause_hides_its_consequences_also_in_a_chain() -> None:
    diagnosis = diagnose(
        EVIDENCE,
        [
            check("PD0003", finding()),
            check("PD0002", finding(), explains=("PD0003",)),
            check("PD0001", finding(), severity="warning", explains=("PD0002",)),
        ],
    )
    assert codes(diagnosis.findings) == ["PD0001"]
    assert codes(diagnosis.findings[0].consequences) == ["PD0002"]
    assert codes(diagnosis.findings[0].consequences[0].consequences) == ["PD0003"]
    assert diagnosis.worst() == "error"


def test_two_that_explain_each_other_are_both_shown_once() -> None:
    diagnosis = diagnose(
        EVIDENCE,
        [
            check("PD0001", finding(), explains=("PD0002",)),
            check("PD0002", finding(), explains=("PD0001",)),
        ],
    )
    (cause,) = diagnosis.findings
    assert len(cause.consequences) == 1


def test_a_symptom_goes_below_an_error_of_its_leg_only() -> None:
    cause = check("PD0001", finding("decode-0"))
    symptom = check("PD0002", finding("decode-0"), finding("router-0"), symptom=True)
    found = diagnose(EVIDENCE, [symptom, cause]).findings
    assert [(each.check.code, each.finding.leg) for each in found] == [
        ("PD0001", "decode-0"),
        ("PD0002", "router-0"),
    ]


def test_a_check_whose_premise_failed_is_skipped() -> None:
    asked = check("PD0002", finding(), premises=("PD0001",))
    diagnosis = diagnose(EVIDENCE, [asked, check("PD0001", finding())])
    assert codes(diagnosis.findings) == ["PD0001"]
    assert [(each.check.code, each.because) for each in diagnosis.skipped] == [("PD0002", "PD0001")]
    assert codes(diagnose(EVIDENCE, [asked, check("PD0001")]).findings) == ["PD0002"]


def test_without_evidence_a_check_is_unknown_and_not_run() -> None:
    diagnosis = diagnose(
        EVIDENCE,
        [
            check("PD0001", finding(), needs=("metrics|log",)),
            check("PD0002", finding(), needs=("commands|log",)),
            check("PD0003", Unknown("the moon", "look up")),
        ],
    )
    assert codes(diagnosis.findings) == ["PD0002"]
    assert [(each.check.code, each.missing) for each in diagnosis.unknown] == [
        ("PD0001", "no metrics or log"),
        ("PD0003", "the moon"),
    ]
    assert "PD0001" not in diagnosis.checks_run


def test_a_check_that_fails_hides_nothing() -> None:
    def broken(evidence: Evidence) -> Iterator[Answer]:
        raise KeyError("oops")

    bad = Check("PD0001", "t", Category.SECURITY, "error", "x", broken)
    diagnosis = diagnose(EVIDENCE, [bad, check("PD0002", finding())])
    assert codes(diagnosis.findings) == ["PD0002"]
    assert "KeyError" in diagnosis.unknown[0].missing


def test_the_worst_comes_first() -> None:
    likely = Finding("prefill-0", "likely", (), "c", "f")
    diagnosis = diagnose(
        EVIDENCE,
        [
            check("PD0001", finding(), severity="info"),
            check("PD0002", likely),
            check("PD0003", finding(), severity="warning"),
            check("PD0004", finding()),
        ],
    )
    assert codes(diagnosis.findings) == ["PD0004", "PD0002", "PD0003", "PD0001"]


def test_codes_titles_and_patterns_are_told_apart() -> None:
    assert len({each.code for each in ALL}) == len(ALL)
    assert len({each.title for each in ALL}) == len(ALL)
    patterns = {pattern for each in ALL for pattern in each.patterns}
    assert len({pattern.name for pattern in patterns}) == len(patterns)


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.code)
def test_what_a_check_refers_to_exists(each: Check) -> None:
    known = {other.code for other in ALL}
    assert set(each.explains) | set(each.premises) <= known
    assert each.code not in each.explains
