"""Whatever the file holds: an answer, never a traceback."""

import copy
import re
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cli import pdctl


def fuzz(examples: int) -> settings:
    """The same examples at every run."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


EXAMPLES = Path(__file__).parents[2] / "examples"
BASES: list[dict[str, Any]] = [
    yaml.safe_load(path.read_text()) for path in sorted(EXAMPLES.glob("*.yaml"))
]
FAULT = re.compile(r".*spec\.yaml:[1-9]\d*:[1-9]\d*: \S.*")


def check(content: bytes) -> None:
    """`validate` and `render` answer alike: 0, or 2 and one fault a line."""
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "spec.yaml")
        spec.write_bytes(content)
        validated = pdctl("validate", spec)
        rendered = pdctl("render", spec, "-o", Path(folder, "out"))
    assert validated.code in (0, 2)
    assert (rendered.code, rendered.err) == (validated.code, validated.err)
    assert all(FAULT.fullmatch(line) and line.isprintable() for line in validated.lines)
    assert validated.lines or validated.code == 0


@fuzz(150)
@given(st.binary(max_size=200))
def test_any_bytes(content: bytes) -> None:
    check(content)


@fuzz(200)
@given(st.text(max_size=200))
def test_any_text(content: str) -> None:
    check(content.encode("utf-8", "surrogatepass"))


PIECES = (
    "name model engine env legs prefill - : ? & * ! !! | > [ ] { } , # % @ ` ' \" \\ << = ~ --- "
    "... &a *a !!int !!float !!bool !!null !!set !!omap !!pairs !!binary !!timestamp "
    "!!python/name:os 0x_ 0b_ 0o8 017 1:60 .inf .nan -.inf 1e400 2024-99-99 2024-01-01 on no null "
    "\\0 \\ud800"
)
YAML_PIECES = st.sampled_from(
    [*PIECES.split(), "\n", "\n  ", "\n    ", " ", "\t", "\0", "\x85", "\u2028", "\ufeff", "é"]
)


@fuzz(300)
@given(st.lists(YAML_PIECES, max_size=40))
def test_pieces_of_yaml(pieces: list[str]) -> None:
    check("".join(pieces).encode())


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 65535, 65536, 10**9, 2**63, 10**400, 10**4000]),
    st.floats(),
    st.dates(),
    st.datetimes(),
    st.binary(max_size=8),
    st.text(max_size=20),
    st.sampled_from(
        [
            "",
            "~",
            "~/x",
            "~x",
            "'",
            '"',
            "\\",
            "$(touch /tmp/x)",
            "`x`",
            "a\nb",
            "--port",
            "{nonce}",
            "{leg}-{nonce}",
            "{x}",
            "}{",
            "8m",
            "1e3",
            "9" * 5000,
            "\0",
            "on",
            "8:00",
            "127.0.0.1",
            "::",
            "UCX",
            "cpu",
            "stock",
            "push",
        ]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(data: Any, where: tuple[Any, ...] = (), above: tuple[Any, ...] = ()) -> list[Any]:
    """The path of every value; not those inside themselves."""
    found = [where] if where else []
    if any(data is other for other in above) or len(above) > 6:
        return found
    items = data.items() if isinstance(data, dict) else ()
    for key, value in enumerate(data) if isinstance(data, list) else items:
        found += places(value, (*where, key), (*above, data))
    return found


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A spec of the examples with some values replaced, dropped, renamed, moved or shared."""
    data = copy.deepcopy(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(1, 4))):
        where = draw(st.sampled_from(places(data)))
        parent = data
        for part in where[:-1]:
            parent = parent[part]
        last = where[-1]
        how = draw(st.sampled_from(["value", "value", "value", "drop", "rename", "alias", "again"]))
        if how == "value":
            parent[last] = draw(VALUES)
        elif how == "drop":
            del parent[last]
        elif how == "alias":
            parent[last] = draw(st.sampled_from([data, parent, data.get("prefill"), parent[last]]))
        elif how == "rename" and isinstance(parent, dict):
            parent[draw(st.one_of(st.text(max_size=12), SCALARS.filter(is_key)))] = parent.pop(last)
        elif how == "again" and isinstance(parent, list):
            parent.append(parent[last])
        if not data:
            break
    text = yaml.dump(
        data, Dumper=yaml.CSafeDumper, allow_unicode=draw(st.booleans()), sort_keys=False
    )
    if draw(st.booleans()):
        lines = text.split("\n")
        line = draw(st.integers(0, len(lines) - 1))
        text = "\n".join([*lines[:line], lines[line], *lines[line:]])
    return text


def is_key(value: Any) -> bool:
    return value is None or isinstance(value, bool | float | str)


@fuzz(400)
@given(mutated())
def test_changed_examples(text: str) -> None:
    check(text.encode("utf-8", "surrogatepass"))
