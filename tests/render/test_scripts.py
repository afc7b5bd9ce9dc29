"""What the rendered scripts start: seen by running them."""

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_router import settings
from tests.cli import pdctl
from tests.render.scripts import EXAMPLES, SPEC, render, run

P5EN = next(path for path in EXAMPLES if path.stem == "p5en-qwen3-32b")
GLM = next(path for path in EXAMPLES if path.stem == "p5en-glm-5-fp8")
LAPTOP = next(path for path in EXAMPLES if path.stem == "laptop")
VENV_PD = ("venv-pd/bin/vllm", "venv-pd/bin/python3")


def spec(**sections: Any) -> dict[str, Any]:
    """The base spec, with keys of sections added or replaced."""
    whole = copy.deepcopy(SPEC)
    for name, section in sections.items():
        whole[name] = {**whole.get(name, {}), **section}
    return whole


def shellcheck(folder: Path) -> str:
    program = Path(sys.executable).with_name("shellcheck")
    scripts = sorted(folder.glob("*.sh"))
    assert len(scripts) >= 4
    ended = subprocess.run(
        [program, "--norc", *scripts], capture_output=True, text=True, check=False
    )
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("bidir", ["on", "off"])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_shellcheck_finds_nothing(path: Path, bidir: str, tmp_path: Path) -> None:
    render(path, tmp_path, "--bidir", bidir)
    assert shellcheck(tmp_path / "out") == ""


def router_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "out" / "router.json").read_text())
    return config


def test_the_articles_prefill_leg(tmp_path: Path) -> None:
    """Environment and flags of section 4 of the article's appendix."""
    render(P5EN, tmp_path)
    leg = run(tmp_path, "prefill-0.sh", *VENV_PD)
    assert leg.env["FI_PROVIDER"] == "efa"
    assert leg.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.1"
    assert leg.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert leg.env["HF_HOME"] == "/fsx/huggingface"
    assert leg.argv[:3] == ["vllm", "serve", "Qwen/Qwen3-32B"]
    assert leg.value("--served-model-name") == "Qwen"
    assert leg.value("--dtype") == "bfloat16"
    assert leg.value("--tensor-parallel-size") == "8"
    assert leg.value("--max-model-len") == "32768"
    assert leg.value("--max-num-seqs") == "8"
    assert "--no-enable-prefix-caching" in leg.argv
    assert leg.value("--port") == "8100"
    assert re.fullmatch(r"p5en-qwen3-32b-prefill-0-[0-9a-f]{12}", leg.kv["engine_id"])
    assert leg.kv | {"engine_id": ""} == {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "pd_connector.connector",
        "kv_buffer_device": "cuda",
        "kv_role": "kv_producer",
        "engine_id": "",
        "kv_rank": 0,
        "kv_parallel_size": 2,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "backends": ["LIBFABRIC"],
            "kv_recompute_threshold": 64,
            "decoder_kv_blocks_ttl": 480,
            "bidirectional_kv_xfer": True,
        },
    }


def test_the_articles_decode_leg(tmp_path: Path) -> None:
    render(P5EN, tmp_path)
    prefill = run(tmp_path, "prefill-0.sh", *VENV_PD)
    decode = run(tmp_path, "decode-0.sh", *VENV_PD)
    assert decode.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.2"
    assert decode.value("--port") == "8200"
    assert "--no-enable-prefix-caching" not in decode.argv
    changed = {key for key in prefill.kv if prefill.kv[key] != decode.kv[key]}
    assert changed == {"kv_role", "kv_rank", "engine_id", "kv_connector_extra_config"}
    extra = prefill.kv["kv_connector_extra_config"] | {"pd_pinned_high_water": 0.8}
    assert decode.kv["kv_connector_extra_config"] == extra
    assert (decode.kv["kv_role"], decode.kv["kv_rank"]) == ("kv_consumer", 1)
    same = ("--dtype", "--max-model-len", "--served-model-name", "--tensor-parallel-size")
    assert [prefill.value(flag) for flag in same] == [decode.value(flag) for flag in same]


def test_the_articles_other_model(tmp_path: Path) -> None:
    render(GLM, tmp_path)
    leg = run(tmp_path, "prefill-0.sh", *VENV_PD)
    assert leg.argv[:3] == ["vllm", "serve", "zai-org/GLM-5-FP8"]
    assert leg.value("--served-model-name") == "GLM"
    assert "--block-size" not in leg.argv


def test_the_engine_id_is_new_at_every_start(tmp_path: Path) -> None:
    render(P5EN, tmp_path)
    ids = {run(tmp_path, "decode-0.sh", *VENV_PD).kv["engine_id"] for _ in range(3)}
    assert len(ids) == 3


def test_the_laptop_legs(tmp_path: Path) -> None:
    folder = tmp_path / "work" / "examples"
    folder.mkdir(parents=True)
    shutil.copy(LAPTOP, folder)
    render(folder / LAPTOP.name, tmp_path)
    leg = run(tmp_path, "prefill-0.sh", "work/.venv/bin/python3")
    module = ["-m", "vllm.entrypoints.openai.api_server", "--model"]
    assert leg.argv[:5] == ["python3", *module, str(tmp_path / "work/.cache/canary")]
    assert leg.env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert leg.env["VLLM_CPU_OMP_THREADS_BIND"] == "0"
    assert leg.env["HF_HUB_OFFLINE"] == "1"
    assert "FI_PROVIDER" not in leg.env
    assert leg.kv["kv_buffer_device"] == "cpu"
    assert leg.kv["kv_connector_extra_config"]["backends"] == ["UCX"]
    router = run(tmp_path, "router-0.sh", "work/.venv/bin/python3")
    assert router.argv[:3] == ["python3", "-m", "pd_router"]
    config = json.loads(Path(router.value("--config")).read_text())
    leg_settings = {"bidirectional": True, "prefix_caching": False}
    assert config["prefill"] == {"prefill-0": {"url": "http://127.0.0.1:8100"} | leg_settings}
    leg_settings["prefix_caching"] = True
    assert config["decode"] == {"decode-0": {"url": "http://127.0.0.1:8200"} | leg_settings}
    assert (config["handle_ttl"], config["decode_ttl"]) == (450, 480)


def test_the_router_accepts_what_is_rendered_for_it(tmp_path: Path) -> None:
    for number, example in enumerate(EXAMPLES):
        render(example, tmp_path / f"{number}")
        loaded = settings.load(tmp_path / f"{number}" / "out" / "router.json")
        assert loaded.proof == "connector"


@pytest.mark.parametrize("native", [None, True, False])
def test_the_routers_native_part_can_be_turned_off(tmp_path: Path, native: bool | None) -> None:
    render(spec(router={} if native is None else {"native": native}), tmp_path)
    loaded = settings.load(tmp_path / "out" / "router.json")
    assert loaded.native is (native is not False)


def test_bidir_changes_that_flag_alone(tmp_path: Path) -> None:
    on, off = (render(P5EN, tmp_path / which, "--bidir", which) for which in ("on", "off"))
    assert on == render(P5EN, tmp_path / "spec")
    assert on.keys() == off.keys()
    assert on["cleanup.sh"] == off["cleanup.sh"]
    for name in ("prefill-0.sh", "decode-0.sh"):
        true, false = '"bidirectional_kv_xfer":true', '"bidirectional_kv_xfer":false'
        assert on[name].count(true) == 1
        assert on[name].replace(true, false) == off[name]
    assert (
        on["router.json"].replace('"bidirectional": true', '"bidirectional": false')
        == (off["router.json"])
    )
    assert on["router-0.sh"] == off["router-0.sh"]


@pytest.mark.parametrize(
    ("transfer", "policy"),
    [
        ({"connector": "pdctl"}, "recompute"),
        ({"connector": "stock"}, "fail"),
        ({"connector": "pdctl", "load_failure_policy": "fail"}, "fail"),
    ],
)
def test_the_load_failure_policy_fits_the_connector(
    transfer: dict[str, str], policy: str, tmp_path: Path
) -> None:
    render(spec(kv_transfer={"backend": "UCX", **transfer}), tmp_path)
    leg = run(tmp_path, "prefill-0.sh")
    assert leg.kv["kv_load_failure_policy"] == policy
    assert leg.kv["kv_connector"] == "NixlConnector"
    assert ("kv_connector_module_path" in leg.kv) is (transfer["connector"] == "pdctl")
    assert router_config(tmp_path)["connector"] == transfer["connector"]


def test_push_uses_vllms_push_connector(tmp_path: Path) -> None:
    push = {"connector": "stock", "mode": "push", "bidirectional": False}
    render(spec(kv_transfer=push), tmp_path)
    leg = run(tmp_path, "prefill-0.sh")
    assert leg.kv["kv_connector"] == "NixlPushConnector"
    assert leg.kv["kv_connector_extra_config"]["bidirectional_kv_xfer"] is False


@pytest.mark.parametrize(
    ("vllm", "device", "wanted", "key", "env", "warns"),
    [
        ("0.28.0", "cuda", "auto", "True", {"VLLM_USE_V2_MODEL_RUNNER": "0"}, False),
        ("0.28.0", "cuda", True, "True", {"VLLM_USE_V2_MODEL_RUNNER": "0"}, False),
        ("0.28.0", "cuda", False, None, {}, False),
        ("0.28.0", "cpu", "auto", None, {}, False),
        ("0.29.0", "cuda", "auto", None, {}, False),
        ("0.29.0", "cuda", True, None, {"VLLM_KV_CACHE_LAYOUT": "BLNHC"}, True),
        ("0.29.0", "cuda", False, None, {}, False),
    ],
)
def test_cross_layer_blocks(
    vllm: str, device: str, wanted: object, key: object, env: object, warns: bool, tmp_path: Path
) -> None:
    text = spec(engine={"vllm": vllm, "device": device}, kv_transfer={"cross_layer_blocks": wanted})
    render(text, tmp_path)
    for name in ("prefill-0.sh", "decode-0.sh"):
        leg = run(tmp_path, name)
        extra = leg.kv["kv_connector_extra_config"]
        assert extra.get("enable_cross_layers_blocks") == key
        names = ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_KV_CACHE_LAYOUT")
        assert {name: leg.env[name] for name in names if name in leg.env} == env
    warnings = pdctl("validate", tmp_path / "spec.yaml").lines
    assert ["warning: kv_transfer.cross_layer_blocks" in line for line in warnings] == [
        True
    ] * warns


@pytest.mark.parametrize(("size", "words"), [(128, ["128"]), (256, ["256"]), (None, [])])
def test_block_size(size: object, words: list[str], tmp_path: Path) -> None:
    render(spec(kv_transfer={"backend": "UCX", "block_size": size}), tmp_path)
    assert run(tmp_path, "prefill-0.sh").values("--block-size") == words


INERT = [
    "it's",
    'say "x"',
    "$(touch executed)",
    "`touch executed`",
    "'$(touch executed)'",
    "'; touch executed; '",
    "a\nb\n",
    "a\r\nb",
    "-n",
    "--flag",
    "a b  c",
    "ünïcödé 模型 🚀",
    "*",
    "a~b",
    "x=~/y",
    "$HOME",
    "${HOME}",
    "\\n\\",
    "!!",
    "{nonce}",
    "$nonce",
    "{{ leg.name }}",
    "{% endfor %}",
    "#no comment",
    "a\tb",
    "\x1b[31m",
    "&|;<>()",
    "",
    " ",
]


def test_values_arrive_as_they_are_and_nothing_is_executed(tmp_path: Path) -> None:
    env = {f"VALUE_{index}": value for index, value in enumerate(INERT)}
    everywhere = spec(
        engine={"env": env, "extra_args": {"all": ["--all", *INERT], "prefill": ["--role"]}},
        prefill={
            "extra_args": ["--section", *INERT],
            "legs": [{"host": "::1", "port": 8100, "extra_args": ["--leg", *INERT]}],
        },
        decode={"legs": [{"host": "::1", "port": 8200, "side_channel_port": 5601}]},
    )
    render(everywhere, tmp_path)
    leg = run(tmp_path, "prefill-0.sh")
    assert {name: leg.env[name] for name in env} == env
    start = leg.argv.index("--all")
    extra = ["--all", *INERT, "--role", "--section", *INERT, "--leg", *INERT]
    assert leg.argv[start : start + len(extra)] == extra
    assert not (tmp_path / "executed").exists()


def test_shellcheck_finds_nothing_in_odd_values(tmp_path: Path) -> None:
    odd = [*INERT, "~", "~/x", "~root/x"]
    text = spec(
        model={"id": "it's $(x)", "served_name": "`x` ~ $y"},
        engine={
            "venv": "a'b $(c)",
            "env": {f"VALUE_{index}": value for index, value in enumerate(odd)},
            "extra_args": {"all": ["--x", *odd]},
        },
        router={"python": "it's $(x)"},
    )
    render(text, tmp_path)
    assert shellcheck(tmp_path / "out") == ""


@pytest.mark.parametrize("value", [value for value in INERT if value and value[0] != "-"])
def test_names_and_paths_are_inert(value: str, tmp_path: Path) -> None:
    text = spec(model={"id": value, "served_name": f"served {value}"})
    render(text, tmp_path)
    leg = run(tmp_path, "prefill-0.sh")
    assert leg.argv[:3] == ["vllm", "serve", value]
    assert leg.value("--served-model-name") == f"served {value}"
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("value", ["it's", "$(touch executed)", "`touch executed`", "a b", "ü\nx"])
def test_a_venv_with_an_odd_name(value: str, tmp_path: Path) -> None:
    render(spec(engine={"venv": value}), tmp_path)
    leg = run(tmp_path, "prefill-0.sh", f"{value}/bin/vllm", f"{value}/bin/python3")
    assert leg.env["PATH"].startswith(f"{tmp_path}/{value}/bin:")
    assert run(tmp_path, "router-0.sh").argv[0] == "python3"
    assert not (tmp_path / "executed").exists()


def test_an_interpreter_instead_of_a_venv(tmp_path: Path) -> None:
    render(spec(engine={"python": "~/my python"}, router={"python": "rpy"}), tmp_path)
    leg = run(tmp_path, "decode-0.sh", "my python")
    assert leg.argv[:4] == ["my python", "-m", "vllm.entrypoints.openai.api_server", "--model"]
    assert run(tmp_path, "router-0.sh", "rpy").argv[:3] == ["rpy", "-m", "pd_router"]


def test_home_is_the_nodes(tmp_path: Path) -> None:
    text = spec(
        model={"id": "~/models/my model", "served_name": "m"},
        engine={"env": {"CACHE": "~/a b", "HOME_ITSELF": "~", "OTHER": "~bin/x"}},
        prefill={"extra_args": ["--download-dir", "~/it's"]},
    )
    render(text, tmp_path)
    leg = run(tmp_path, "prefill-0.sh")
    assert leg.argv[2] == f"{tmp_path}/models/my model"
    assert leg.value("--download-dir") == f"{tmp_path}/it's"
    assert leg.env["CACHE"] == f"{tmp_path}/a b"
    assert (leg.env["HOME_ITSELF"], leg.env["OTHER"]) == (str(tmp_path), "~bin/x")


def test_without_pd_connector_a_leg_says_so_and_does_not_start(tmp_path: Path) -> None:
    render(SPEC, tmp_path)
    run(tmp_path, "prefill-0.sh")
    (tmp_path / "bin/python3").write_text("#!/bin/sh\nexit 1\n")
    ended = subprocess.run(
        [tmp_path / "out/prefill-0.sh"],
        env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "FAKE_OUTPUT": str(tmp_path / "started")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 1
    assert "prefill-0: pd_connector is not installed beside vLLM" in ended.stderr
    assert not (tmp_path / "started").exists()


def test_a_missing_venv_is_named(tmp_path: Path) -> None:
    render(spec(engine={"venv": "no/such"}), tmp_path)
    ended = subprocess.run(
        ["bash", tmp_path / "out/prefill-0.sh"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr == (
        f"prefill-0: no virtual environment at {tmp_path}/no/such, where engine.venv says\n"
    )


def test_two_prefill_and_three_decode_legs(tmp_path: Path) -> None:
    text = spec(
        prefill={"legs": [{"host": f"10.0.0.{n}", "port": 8100} for n in (1, 2)]},
        decode={
            "legs": [
                {"host": "10.0.1.1", "port": 8200 + n, "side_channel_port": 5600 + 10 * n}
                for n in range(3)
            ]
        },
        router={"host": "0.0.0.0", "port": 9000, "conversation_headers": ["X-Chat"]},
    )
    files = render(text, tmp_path)
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    scripts = {f"{name}.sh" for name in [*names, "router-0", "cleanup"]}
    assert set(files) == scripts | {"router.json"}
    legs = [run(tmp_path, f"{name}.sh") for name in names]
    assert [leg.value("--port") for leg in legs] == ["8100", "8100", "8200", "8201", "8202"]
    assert [leg.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for leg in legs] == [
        *("5600", "5600"),
        *("5600", "5610", "5620"),
    ]
    ids = [leg.kv["engine_id"] for leg in legs]
    assert [engine_id.rsplit("-", 1)[0] for engine_id in ids] == [f"demo-{name}" for name in names]
    config = router_config(tmp_path)
    assert [leg["url"] for leg in config["prefill"].values()] == [
        "http://10.0.0.1:8100",
        "http://10.0.0.2:8100",
    ]
    assert {name: leg["url"] for name, leg in config["decode"].items()} == {
        f"decode-{n}": f"http://10.0.1.1:{8200 + n}" for n in range(3)
    }
    assert (config["host"], config["port"]) == ("0.0.0.0", 9000)
    assert config["conversation_headers"] == ["X-Chat"]


def test_a_leg_overrides_its_role(tmp_path: Path) -> None:
    text = spec(
        prefill={
            "tensor_parallel": 4,
            "max_num_seqs": 16,
            "prefix_caching": True,
            "gpu_memory_utilization": 0.85,
            "enforce_eager": True,
            "legs": [
                {"host": "10.0.0.1", "port": 8100},
                {
                    "host": "10.0.0.2",
                    "bind": "0.0.0.0",
                    "port": 8100,
                    "side_channel_host": "10.9.0.2",
                    "tensor_parallel": 2,
                    "max_num_seqs": 8,
                    "prefix_caching": False,
                    "gpu_memory_utilization": 0.5,
                    "enforce_eager": False,
                    "engine_id": "mine-{role}-{nonce}",
                },
            ],
        }
    )
    render(text, tmp_path)
    plain, own = run(tmp_path, "prefill-0.sh"), run(tmp_path, "prefill-1.sh")
    flags = ("--tensor-parallel-size", "--max-num-seqs", "--gpu-memory-utilization", "--host")
    assert [plain.value(flag) for flag in flags] == ["4", "16", "0.85", "10.0.0.1"]
    assert [own.value(flag) for flag in flags] == ["2", "8", "0.5", "0.0.0.0"]
    assert "--enforce-eager" in plain.argv
    assert "--enforce-eager" not in own.argv
    assert "--enable-prefix-caching" in plain.argv
    assert "--no-enable-prefix-caching" in own.argv
    assert own.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.9.0.2"
    assert own.kv["engine_id"].startswith("mine-prefill-")
    legs = router_config(tmp_path)["prefill"]
    assert legs["prefill-0"]["prefix_caching"] is True
    assert (legs["prefill-1"]["url"], legs["prefill-1"]["prefix_caching"]) == (
        "http://10.0.0.2:8100",
        False,
    )


def test_the_nearest_environment_wins(tmp_path: Path) -> None:
    names = ["UCX_A", "UCX_B", "UCX_C", "UCX_D"]
    text = spec(
        engine={"env": dict.fromkeys(names, "engine")},
        fabric={"env": dict.fromkeys(names[1:], "fabric")},
        prefill={
            "env": dict.fromkeys(names[2:], "role"),
            "legs": [{"host": "10.0.0.1", "port": 8100, "env": {"UCX_D": "leg"}}],
        },
    )
    render(text, tmp_path)
    leg, other = run(tmp_path, "prefill-0.sh"), run(tmp_path, "decode-0.sh")
    assert [leg.env[name] for name in names] == ["engine", "fabric", "role", "leg"]
    assert [other.env[name] for name in names] == ["engine", "fabric", "fabric", "fabric"]


def test_data_parallel_ranks(tmp_path: Path) -> None:
    render(spec(prefill={"data_parallel": 4}), tmp_path)
    assert run(tmp_path, "prefill-0.sh").value("--data-parallel-size") == "4"
    assert "--data-parallel-size" not in run(tmp_path, "decode-0.sh").argv


def test_settings_of_observability_and_cache(tmp_path: Path) -> None:
    text = spec(
        model={"kv_cache_dtype": "fp8_e4m3"},
        observability={"otlp_endpoint": "http://o:4317", "nixl_log_level": "DEBUG"},
        router={"handle_ttl": "1m30s", "readback_timeout": "0.25s"},
        kv_transfer={"decode_ttl": 12345678, "recompute_threshold": 0},
    )
    render(text, tmp_path)
    leg = run(tmp_path, "prefill-0.sh")
    assert leg.value("--kv-cache-dtype") == "fp8_e4m3"
    assert leg.value("--otlp-traces-endpoint") == "http://o:4317"
    assert leg.env["NIXL_LOG_LEVEL"] == "DEBUG"
    assert leg.kv["kv_connector_extra_config"]["decoder_kv_blocks_ttl"] == 12345678
    assert leg.kv["kv_connector_extra_config"]["kv_recompute_threshold"] == 0
    config = router_config(tmp_path)
    assert (config["handle_ttl"], config["readback_timeout"]) == (90, 0.25)
    assert (config["decode_ttl"], config["recompute_threshold"]) == (12345678, 0)
    assert config["otlp_endpoint"] == "http://o:4317"


def test_ipv6_addresses(tmp_path: Path) -> None:
    text = spec(
        prefill={"legs": [{"host": "fd00::1", "port": 8100}]},
        decode={"legs": [{"host": "fd00::2", "port": 8200}]},
    )
    render(text, tmp_path)
    assert run(tmp_path, "prefill-0.sh").value("--host") == "fd00::1"
    assert router_config(tmp_path)["prefill"]["prefill-0"]["url"] == "http://[fd00::1]:8100"


def test_shellcheck_finds_nothing_in_a_large_deployment(tmp_path: Path) -> None:
    text = spec(
        engine={"venv": "~/v", "env": {"A": "it's"}, "extra_args": {"all": ["--x", "a b"]}},
        prefill={"legs": [{"host": f"p{n}", "port": 8100} for n in range(8)]},
        decode={"legs": [{"host": f"d{n}", "port": 8200} for n in range(8)]},
        router={"python": "~/r/bin/python", "conversation_headers": ["X-A", "X-B"]},
    )
    render(text, tmp_path)
    assert shellcheck(tmp_path / "out") == ""


def test_kv_config_is_one_line_of_json(tmp_path: Path) -> None:
    render(P5EN, tmp_path)
    text = run(tmp_path, "prefill-0.sh", *VENV_PD).value("--kv-transfer-config")
    assert "\n" not in text
    assert json.loads(text)
    assert yaml.safe_load(text) == json.loads(text)


def test_all_legs_are_told_where_the_secret_is_and_no_script_holds_one(tmp_path: Path) -> None:
    render(spec(kv_transfer={"secret_file": "~/secret"}, router={"port": 8000}), tmp_path)
    (tmp_path / "secret").write_text("f" * 64)
    for leg in ("prefill-0.sh", "decode-0.sh", "router-0.sh"):
        assert run(tmp_path, leg).env["PD_SECRET_FILE"] == f"{tmp_path}/secret"


def test_without_a_secret_in_the_spec_the_nodes_own_is_taken(tmp_path: Path) -> None:
    files = render(spec(), tmp_path)
    assert "PD_SECRET_FILE" not in run(tmp_path, "prefill-0.sh").env
    assert "openssl rand -hex 32" in files["prefill-0.sh"]


def test_every_plugin_that_vllm_would_load_stays_loaded(tmp_path: Path) -> None:
    """VLLM_PLUGINS must name ours for its HTTP routes, and then names all there are."""
    own = Path(sys.executable).parent
    call = "from pd_connector.check import plugins; print(','.join(plugins()))"
    named = subprocess.run(
        [own / "python", "-c", call], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert "pd_connector" in named.split(",")
    files = render(spec(), tmp_path)
    assert 'print(",".join(plugins()))' in files["prefill-0.sh"]
    assert "VLLM_PLUGINS" in run(tmp_path, "prefill-0.sh").env


@pytest.mark.parametrize(("vllm", "told"), [("0.31.0", True), ("0.32.0", False)])
def test_ranks_are_told_as_long_as_vllm_takes_them(vllm: str, told: bool, tmp_path: Path) -> None:
    render(spec(engine={"vllm": vllm}), tmp_path)
    kv = run(tmp_path, "prefill-0.sh").kv
    assert ("kv_rank" in kv, "kv_parallel_size" in kv) == (told, told)
