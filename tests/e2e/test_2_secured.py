"""A router that wants TLS and keys, in front of the running pair, and pdctl that speaks to it."""

import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pd_connector.contract import Outcome

from .conftest import Deployment
from .routers import Chat, outcome

KEYS = ("key-one", "key-two")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return cert


@pytest.fixture(scope="module", autouse=True)
def up(deployment: Deployment, certificate: Path) -> Iterator[None]:
    """The router is another one for this module; the engines stay."""
    keys = certificate.with_name("keys")
    keys.write_text("\n".join(KEYS))
    usual, plain_url = deployment.spec["router"], deployment.router_url
    deployment.spec["router"] = usual | {
        "tls_certificate": str(certificate),
        "tls_key": str(certificate.with_name("key.pem")),
        "api_keys_file": str(keys),
    }
    deployment.router_url = plain_url.replace("http:", "https:")
    deployment.write()
    try:
        deployment.pdctl("up", "SPEC", "--bidir", "on")
        yield
    finally:
        deployment.spec["router"], deployment.router_url = usual, plain_url
        deployment.write()


@pytest.fixture
def client(certificate: Path) -> Iterator[httpx.Client]:
    trust = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(timeout=60, trust_env=False, verify=trust) as client:
        yield client


def test_turns_by_tls_and_key(deployment: Deployment, client: httpx.Client) -> None:
    for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
        refused = client.post(deployment.router_url + path, json={"model": "canary"})
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    chat = Chat(deployment, deployment.router_url, conversation_id="keys")
    chat.client = client
    chat.headers["Authorization"] = f"Bearer {KEYS[0]}"
    assert outcome(chat.say()) == Outcome.MISS.value
    assert outcome(chat.say(50)) == Outcome.HIT.value
    # Another key is another tenant, whatever the conversation is called.
    other = chat.copy()
    other.headers["Authorization"] = f"Bearer {KEYS[1]}"
    assert outcome(other.say(50)) == Outcome.MISS.value
    assert outcome(chat.say(50)) == Outcome.HIT.value
    assert not any(key in deployment.log("router-0") for key in KEYS)


def test_pdctl_has_the_key_and_trusts_the_authority(
    deployment: Deployment, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {leg["phase"] for leg in deployment.status().values()} == {"healthy"}
    refused = deployment.pdctl("verify", "SPEC", ok=False)
    assert refused.returncode == 1
    monkeypatch.setenv("PDCTL_CA_FILE", str(certificate))
    refused = deployment.pdctl("verify", "SPEC", ok=False)
    assert (refused.returncode, "API key" in refused.stdout + refused.stderr) == (1, True)
    monkeypatch.setenv("PDCTL_API_KEY", KEYS[1])
    deployment.pdctl("verify", "SPEC")
