"""The examples, the commented reference and the JSON Schema say the same as the model."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pdctl.spec import Spec, load
from pdctl.spec.model import FORMS
from pdctl.spec.units import Duration, Size
from tests.cli import pdctl

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
REFERENCE = Path(__file__).parents[2] / "examples" / "laptop.yaml"
BASE: str = yaml.safe_load(Path(__file__).with_name("wrong_specs.yaml").read_text())["base"]
SAID_IN_WORDS = {
    "the id",
    "none",
    "host",
    "not set",
    "not checked",
    "vLLM's",
    "NIXL's",
    "the engine's",
    "the engine's device",
    "kv_transfer.engine_id",
    "off on prefill, on on decode",
}
"""How the reference tells a default that is no value: None or empty in the model."""


def model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(model_in, get_args(annotation))), None)


def fields(section: type[BaseModel], where: tuple[str, ...] = ()) -> Iterator[Any]:
    """Path and field of every key. Decode is like prefill, a leg like its role."""
    for key, field in section.model_fields.items():
        if (*where, key) == ("decode",):
            continue
        if where == ("prefill", "legs") and key in model_fields_of("prefill"):
            continue
        yield (*where, key), field
        inner = model_in(field.annotation)
        if inner:
            yield from fields(inner, (*where, key))


def model_fields_of(key: str) -> set[str]:
    role = model_in(Spec.model_fields[key].annotation)
    assert role
    return set(role.model_fields) - {"legs"}


def comments() -> dict[tuple[str, ...], str]:
    """The comment above every key of the reference."""
    found: dict[tuple[str, ...], str] = {}
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in REFERENCE.read_text().splitlines():
        text = re.sub(r"^( *)- ", r"\1  ", line)
        if text.strip().startswith("#"):
            comment.append(text.strip().removeprefix("#").strip())
        elif match := re.match(r"( *)([A-Za-z_]+):", text):
            while path and path[-1][0] >= len(match[1]):
                path.pop()
            path.append((len(match[1]), match[2]))
            found[tuple(key for _, key in path)] = " ".join(comment)
            comment = []
        else:
            comment = []
    return found


COMMENTS = comments()
FIELDS = dict(fields(Spec))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_right(path: Path) -> None:
    ended = pdctl("validate", path)
    assert (ended.code, ended.out, ended.err) == (0, f"{path}: ok\n", "")


@pytest.mark.parametrize("where", FIELDS, ids=".".join)
def test_the_reference_has_every_key_in_its_place(where: tuple[str, ...]) -> None:
    assert where in COMMENTS
    value_has_keys = model_in(FIELDS[where].annotation)
    in_one_comment = where[:2] == ("engine", "extra_args")
    assert COMMENTS[where] or value_has_keys or in_one_comment


def test_the_reference_has_no_other_key() -> None:
    free = {where for where in COMMENTS if "env" in where[:-1]}
    legs = {where for where in COMMENTS if where[0] == "decode"}
    assert set(COMMENTS) - free - legs == set(FIELDS)


@pytest.mark.parametrize("where", FIELDS, ids=".".join)
def test_the_reference_tells_the_default(where: tuple[str, ...]) -> None:
    field: FieldInfo = FIELDS[where]
    if model_in(field.annotation) and where[-1] != "legs":
        return
    comment = COMMENTS[where] or COMMENTS[where[:-1]]
    if field.is_required():
        assert "Default:" not in comment
        assert "Required." in comment or where == ("prefill", "legs")
        return
    default = field.get_default(call_default_factory=True, validated_data={})
    assert default is not PydanticUndefined
    said = said_default(comment)
    if said == "this":
        said = str(yaml.safe_load(REFERENCE.read_text())[where[0]][where[1]])
    if default in (None, [], {}):
        assert said in SAID_IN_WORDS
    else:
        assert as_the_model_reads(field, said) == default


def said_default(comment: str) -> str:
    if match := re.search(r"Default: (.+?)(?:[;,.](?: |$)|$)", comment):
        said = match[1]
        return f"{said}, on on decode" if said == "off on prefill" else said
    if match := re.search(r"(\S+) \(default", comment):
        return match[1]
    raise AssertionError(f"tells no default: {comment!r}")


def as_the_model_reads(field: FieldInfo, said: str) -> Any:
    value = said if field.annotation is str else yaml.safe_load(said)
    return TypeAdapter(Any if field.annotation is Any else rebuilt(field)).validate_python(value)


def rebuilt(field: FieldInfo) -> Any:
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def schema() -> Draft202012Validator:
    ended = pdctl("schema")
    assert (ended.code, ended.err) == (0, "")
    text = json.loads(ended.out)
    Draft202012Validator.check_schema(text)
    return Draft202012Validator(text)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_schema_accepts_the_examples(path: Path) -> None:
    errors = schema().iter_errors(yaml.safe_load(path.read_text()))
    assert [error.message for error in errors] == []


@pytest.mark.parametrize(
    ("this", "by"),
    [
        ("decode_ttl:", "decode_tll:"),
        ("name: demo", "name: Demo"),
        ("port: 8100", "port: 81000"),
        ("port: 8100", "port: '8100'"),
        ("decode_ttl: 480s", "decode_ttl: 8 minutes"),
        ("backend: LIBFABRIC", "backend: TCP"),
        ("  max_model_len: 4096\n", ""),
        ("host: 10.0.0.1", "host: http://10.0.0.1"),
        ("device: cuda", "device: cuda\n  env: {MY-VAR: 1}"),
        ("device: cuda", "device: cuda\n  cpu_kv_cache: much"),
        ("provider: efa", "provider: efa\nbenchmark: {turns: 1}"),
    ],
)
def test_the_schema_refuses_what_validate_refuses(this: str, by: str, tmp_path: Path) -> None:
    text = BASE.replace(this, by, 1)
    spec = tmp_path / "spec.yaml"
    spec.write_text(text)
    assert schema().is_valid(yaml.safe_load(BASE))
    assert not schema().is_valid(yaml.safe_load(text))
    assert pdctl("validate", spec).code == 2


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("480", 480),
        ("480s", 480),
        ("8m", 480),
        ("1h30m", 5400),
        ("250ms", 0.25),
        ("1.5 h", 5400),
        ("'480'", 480),
        ("8M", 480),
        ("1d", 86400),
        ("0.123456789012345", 0.123456789012345),
    ],
)
def test_durations_as_people_write_them(written: str, seconds: float, tmp_path: Path) -> None:
    text = BASE.replace("handle_ttl: 450s", f"readback_timeout: {written}\n  handle_ttl: 1s")
    (tmp_path / "spec.yaml").write_text(text)
    assert load(tmp_path / "spec.yaml").spec.router.readback_timeout == seconds
    assert schema().is_valid(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("4Gi", 4 << 30),
        ("4G", 4 * 10**9),
        ("1.5GB", 1_500_000_000),
        ("4096B", 4096),
    ],
)
def test_sizes_as_people_write_them(written: str, size: int, tmp_path: Path) -> None:
    text = BASE.replace("device: cuda", f"device: cuda\n  cpu_kv_cache: {written}")
    (tmp_path / "spec.yaml").write_text(text)
    assert load(tmp_path / "spec.yaml").spec.engine.cpu_kv_cache == size
    assert schema().is_valid(yaml.safe_load(text))


def test_variables_and_arguments_stay_as_they_are_written(tmp_path: Path) -> None:
    env = "{A: 1.10, B: 0x1f, C: on, D: 010, E: 8:00, F: 2024-01-01, G: 1_000, H: =, I: '', J: <<}"
    (tmp_path / "spec.yaml").write_text(
        BASE.replace("device: cuda", f"device: cuda\n  env: {env}").replace(
            "tensor_parallel: 2", "tensor_parallel: 2\n  extra_args: [--x, 1.10, off, 0x1f]"
        )
    )
    spec = load(tmp_path / "spec.yaml").spec
    assert spec.engine.env == {
        "A": "1.10",
        "B": "0x1f",
        "C": "on",
        "D": "010",
        "E": "8:00",
        "F": "2024-01-01",
        "G": "1_000",
        "H": "=",
        "I": "",
        "J": "<<",
    }
    assert spec.prefill.extra_args == ["--x", "1.10", "off", "0x1f"]


def test_a_number_shared_with_a_variable_stays_a_number(tmp_path: Path) -> None:
    text = BASE.replace("port: 8100", "port: &p 8100\n      env: {PORT: *p}")
    (tmp_path / "spec.yaml").write_text(text)
    leg = load(tmp_path / "spec.yaml").spec.prefill.legs[0]
    assert (leg.port, leg.env) == (8100, {"PORT": "8100"})


def test_legs_share_by_merge_keys(tmp_path: Path) -> None:
    text = BASE.replace("    - host: 10.0.0.1", "    - &leg\n      host: 10.0.0.1").replace(
        "decode:", "    - <<: *leg\n      host: 10.0.0.9\ndecode:"
    )
    (tmp_path / "spec.yaml").write_text(text)
    legs = load(tmp_path / "spec.yaml").spec.prefill.legs
    assert [(leg.host, leg.port) for leg in legs] == [("10.0.0.1", 8100), ("10.0.0.9", 8100)]


@pytest.mark.parametrize(
    "host", ["gpu-1", "gpu_1.internal", "10.0.0.1", "::1", "fd00::1", "localhost", "a.b.c"]
)
def test_hosts(host: str, tmp_path: Path) -> None:
    text = BASE.replace("host: 10.0.0.3", f"host: '{host}'")
    (tmp_path / "spec.yaml").write_text(text)
    assert load(tmp_path / "spec.yaml").spec.router.host == host


@pytest.mark.parametrize(
    ("these", "clash"),
    [
        (("127.0.0.1", "127.0.0.2", "null"), False),
        (("127.0.0.1", "localhost", "null"), True),
        (("127.0.0.1", "127.0.0.2", "0.0.0.0"), True),
        (("10.0.0.1", "10.0.0.2", "0.0.0.0"), False),
        (("gpu-1", "GPU-1", "null"), True),
    ],
)
def test_ports_clash_on_one_address_only(
    these: tuple[str, str, str], clash: bool, tmp_path: Path
) -> None:
    first, second, bind = these
    (tmp_path / "spec.yaml").write_text(
        BASE.replace("10.0.0.1", first).replace(
            "host: 10.0.0.2\n      port: 8200",
            f"host: {second}\n      bind: {bind}\n      port: 8100\n      side_channel_port: 5700",
        )
    )
    ended = pdctl("validate", tmp_path / "spec.yaml")
    assert ("already prefill-0's port" in ended.err) is clash
    assert ended.code == (2 if clash else 0)


def test_tensor_parallel_sizes_matter_between_roles_only(tmp_path: Path) -> None:
    text = BASE.replace(
        "decode:\n",
        "    - {host: 10.0.0.4, port: 8100, tensor_parallel: 3}\ndecode:\n  tensor_parallel: 6\n",
    )
    (tmp_path / "spec.yaml").write_text(text)
    assert pdctl("validate", tmp_path / "spec.yaml").code == 0


def test_a_variable_is_free_where_pdctl_does_not_set_it(tmp_path: Path) -> None:
    env = "{VLLM_USE_V2_MODEL_RUNNER: 0, VLLM_KV_CACHE_LAYOUT: HND}"
    (tmp_path / "spec.yaml").write_text(BASE.replace("device: cuda", f"device: cuda\n  env: {env}"))
    assert pdctl("validate", tmp_path / "spec.yaml").code == 0


def patterns_in(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("pattern"), str):
            yield node["pattern"]
        node = list(node.values())
    if isinstance(node, list):
        for value in node:
            yield from patterns_in(value)


def test_every_pattern_of_the_schema_has_words_for_messages() -> None:
    # Durations and sizes have parsers with messages of their own.
    parsed = {
        pattern
        for kind in (Duration, Size)
        for pattern in patterns_in(TypeAdapter(kind).json_schema())
    }
    assert set(patterns_in(Spec.model_json_schema())) - parsed <= set(FORMS)
