"""What collect takes out of evidence, and what it leaves."""

import io
from pathlib import Path

import pytest

from pdctl.doctor.evidence import redact
from pdctl.doctor.evidence.pack import redacted_copy

SECRETS = [
    ("Authorization: Bearer abcdef123456", "abcdef123456"),
    ('headers={"authorization": "Basic dXNlcjpwYXNz"}', "dXNlcjpwYXNz"),
    ("loading with token hf_AbCdEfGhIjKlMnOp", "hf_AbCdEfGhIjKlMnOp"),
    ("OPENAI_API_KEY=sk-proj-1234567890abcdef", "1234567890abcdef"),
    ("--api-key my-own-key-77 --port 8000", "my-own-key-77"),
    ("'--api-key', 'my-own-key-77'", "my-own-key-77"),
    ("api_key='my-own-key-77', model='m'", "my-own-key-77"),
    ("aws_access_key_id=AKIAABCDEFGHIJKLMNOP", "AKIAABCDEFGHIJKLMNOP"),
    ("aws_secret_access_key: wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI"),
    ("redis://user:hunter2@10.0.0.9:6379/0", "hunter2"),
    ("jwt eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2QT4", "SflKxwRJSMeKKF2QT4"),
    ("X-PD-Key: 00ff00ff00ff", "00ff00ff00ff"),
    (
        "Received request chatcmpl-1: prompt: 'my salary is 7', params: SamplingParams(n=1)",
        "salary",
    ),
    ('{"messages": [{"role": "user", "content": "my salary is 7"}]}', "salary"),
    ("prompt_token_ids: [101, 202, 303], lora_request: None.", "202"),
    ("prompt='it\\'s my salary', n=1", "salary"),
]


@pytest.mark.parametrize(("line", "secret"), SECRETS)
def test_secrets_and_prompts_go(line: str, secret: str) -> None:
    assert secret in line
    assert secret not in redact.text(line)
    assert redact.GONE in redact.text(line)


@pytest.mark.parametrize(
    "line",
    [
        "Avg prompt throughput: 12.0 tokens/s, Avg generation throughput: 3.0 tokens/s",
        "pd_connector: connector active: role=kv_producer bidirectional=True "
        "kv_recompute_threshold=64 decoder_kv_blocks_ttl=480 kv_load_failure_policy=recompute",
        'vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 918221.0',
        "Declining expired remote read for chatcmpl-1 from engine decode-001.",
        "NIXL compatibility check passed (hash: 3f0c11e1)",
        "Failing 1 request(s) due to KV load failure (failure_policy=fail, 12 tokens affected).",
        "$ connect 10.0.0.1 5600",
        "GET /health HTTP/1.1 200 http://10.0.0.1:8100/health",
        "content-type: application/json",
        "tokenizer='/models/canary', enable_prompt_tokens_details=True",
    ],
)
def test_what_a_check_reads_stays(line: str) -> None:
    assert redact.text(line) == line


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("HF_TOKEN", True),
        ("VLLM_API_KEY", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("DB_PASSWORD", True),
        ("PD_SECRET_FILE", False),
        ("MAX_NUM_BATCHED_TOKENS", False),
        ("TOKENIZERS_PARALLELISM", False),
        ("VLLM_NIXL_SIDE_CHANNEL_HOST", False),
    ],
)
def test_variables(name: str, gone: bool) -> None:
    assert (redact.variable(name, "value-1") == redact.GONE) is gone


def test_a_log_is_copied_line_by_line_without_its_secrets(tmp_path: Path) -> None:
    source = tmp_path / "log"
    kept = [f"line {number} \udcff".encode(errors="surrogateescape") for number in range(30_000)]
    lines = list(kept)
    for number in range(0, 30_000, 1000):
        lines[number] = b"Authorization: Bearer abcdef123456"
    source.write_bytes(b"\n".join(lines) + b"\nend without newline hf_AbCdEfGhIjKlMnOp")
    target = io.BytesIO()
    assert redacted_copy(source, target) == 31
    copied = target.getvalue().split(b"\n")
    assert len(copied) == len(lines) + 1
    assert b"abcdef123456" not in target.getvalue()
    assert b"AbCdEfGhIjKlMnOp" not in target.getvalue()
    assert [line for number, line in enumerate(copied[:-1]) if number % 1000] == [
        line for number, line in enumerate(kept) if number % 1000
    ]
