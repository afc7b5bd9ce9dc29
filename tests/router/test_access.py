"""Who may ask: API keys, the admin token, TLS."""

import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from router_rig import Chat, StartRouter, wait_for


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# for the tests\nkey-one\n\n  key-two \n")
    return path


def test_api_keys(start_router: StartRouter, keys: Path) -> None:
    router = start_router(api_keys_file=str(keys))
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
    for headers in ({}, {"authorization": "Bearer key"}, {"authorization": "Basic key-one"}):
        answer = router.post(body, **headers)
        assert (answer.status, answer.json["error"]["type"]) == (401, "authentication_error")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert router.post(body, authorization="Bearer # for the tests").status == 401
    assert router.post({}, "/v1/messages").json["type"] == "error"
    assert router.decode[0].requests == router.decode[0].others == []
    assert router.post(body, authorization="Bearer key-one").status == 200
    assert router.post({"input": "x"}, "/v1/messages", x_api_key="key-two").status == 200
    assert router.get("/v1/models").status_code == 401
    assert router.get("/metrics").status_code == router.get("/health").status_code == 200
    assert "key-one" not in router.log


def test_keys_are_read_again(start_router: StartRouter, keys: Path) -> None:
    router = start_router(api_keys_file=str(keys))
    keys.write_text("key-three\n")
    assert router.get("/v1/models").status_code == 401
    router.hang_up()
    wait_for(
        lambda: (
            router.http.get(
                router.url + "/v1/models", headers={"authorization": "Bearer key-three"}
            ).is_success
        ),
        "the new key is good",
    )
    answer = router.http.get(router.url + "/v1/models", headers={"authorization": "Bearer key-one"})
    assert answer.status_code == 401


def test_an_empty_key_file_is_one_clear_line(start_router: StartRouter, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    for path, words in ((empty, "there is no key in it"), (tmp_path / "no", "No such file")):
        with pytest.raises(AssertionError) as failure:
            start_router(api_keys_file=str(path))
        assert f"api_keys_file: {path}: {words}" in str(failure.value)


def test_admin_without_a_token_is_for_this_machine(start_router: StartRouter) -> None:
    router = start_router()
    assert router.get("/admin/legs").status_code == 200
    for header in ("X-Forwarded-For", "Via", "Origin"):
        answer = router.http.get(router.url + "/admin/legs", headers={header: "10.0.0.1"})
        assert answer.status_code == 403
    answer = router.http.get(router.url + "/admin/legs", headers={"Host": "rebound.example:80"})
    assert answer.status_code == 403


def test_admin_with_a_token(start_router: StartRouter, keys: Path) -> None:
    router = start_router(admin_token_file=str(keys))
    assert router.get("/admin/legs").status_code == 401
    for token, status in (("key-one", 200), ("key", 401)):
        answer = router.http.get(
            router.url + "/admin/legs", headers={"authorization": f"Bearer {token}"}
        )
        assert answer.status_code == status


def test_the_admin_token_opens_admin_beside_api_keys_and_nothing_else(
    start_router: StartRouter, keys: Path, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("the-token\n")
    router = start_router(api_keys_file=str(keys), admin_token_file=str(token))

    def status(path: str, key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return router.http.get(router.url + path, headers=headers).status_code

    for path in ("/admin/legs", "/admin/process", "/%61dmin/legs"):
        assert (status(path, "the-token"), status(path, "key-one")) == (200, 401)
        assert router.get(path).status_code == 401
    assert (status("/v1/models", "the-token"), status("/v1/models", "key-one")) == (401, 200)


def test_conversations_are_seen_and_released(start_router: StartRouter) -> None:
    router = start_router()
    chats = [Chat(router, f"secret-{n}") for n in range(3)]
    for chat in chats:
        chat.say("Hello")
    seen = router.get("/admin/conversations?limit=2").json()
    assert (seen["held"], len(seen["conversations"])) == (3, 2)
    assert "secret" not in str(seen)
    router.check_secrets(str(seen).encode())
    newest = seen["conversations"][0]
    assert newest["leg"] == "decode-0"
    assert newest["usable"]
    short = newest["id"][:12]
    assert (
        router.get(f"/admin/conversations/{short}").json()["conversations"][0]["id"]
        == (newest["id"])
    )
    gone = router.http.delete(router.url + f"/admin/conversations/{short}")
    assert gone.json() == {"released": 1}
    assert router.http.delete(router.url + f"/admin/conversations/{short}").status_code == 404
    outcomes = [chat.say("Again").outcome for chat in chats]
    assert outcomes == ["hit", "hit", "miss"]
    for wrong in ("limit=0", "limit=x", "offset=-1"):
        assert router.get(f"/admin/conversations?{wrong}").status_code == 400


def test_a_draining_leg_gets_no_new_turns(start_router: StartRouter) -> None:
    router = start_router(decodes=2)
    chat = Chat(router, "c")
    chat.say("Hello")
    home = 0 if router.decode[0].requests else 1
    drained = router.http.post(router.url + f"/admin/legs/decode-{home}/drain").json()
    assert drained["draining"] is True
    # Its blocks are still read; the answer is made elsewhere.
    assert chat.say("Again").outcome == "hit"
    assert len(router.decode[home].requests) == 1
    assert len(router.decode[1 - home].requests) == 1
    legs = {leg["name"]: leg for leg in router.get("/admin/legs").json()["legs"]}
    assert legs[f"decode-{home}"]["draining"]
    router.http.post(router.url + f"/admin/legs/decode-{home}/undrain")
    router.http.post(router.url + f"/admin/legs/decode-{1 - home}/drain")
    assert chat.say("And now?").status == 200
    assert len(router.decode[home].requests) == 2
    assert router.http.post(router.url + "/admin/legs/none/drain").status_code == 404


def test_tls(start_router: StartRouter, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.create_default_context(cafile=str(cert))
    router = start_router(
        tls={"certificate": str(cert), "key": str(key)}, http=httpx.Client(verify=context)
    )
    chat = Chat(router, "c")
    assert chat.say("Hello").outcome == "miss"
    assert chat.say("x" * 100_000).outcome == "hit"
    with pytest.raises(httpx.HTTPError):
        httpx.get(router.url.replace("https", "http") + "/health")


def test_unusable_tls_files_are_one_clear_line(start_router: StartRouter, tmp_path: Path) -> None:
    wrong = tmp_path / "cert.pem"
    wrong.write_text("no certificate")
    with pytest.raises(AssertionError) as failure:
        start_router(tls={"certificate": str(wrong), "key": str(wrong)})
    assert f"tls: {wrong}, {wrong}: " in str(failure.value)
    assert "Traceback" not in str(failure.value)
