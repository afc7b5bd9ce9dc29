"""up, status, logs and down over fake engines: what is started, what is left alone, what stops."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from tests.ports import free_ports
from tests.waiting import until

from .conftest import Place, leg, running


def test_up_status_down(place: Place) -> None:
    up = place.pdctl("up", "SPEC")
    assert f"router: http://127.0.0.1:{place.spec['router']['port']}/v1" in up.stdout
    assert "prefill-0: healthy after" in up.stderr
    legs = place.legs()
    assert list(legs) == ["prefill-0", "decode-0", "router-0"]
    assert {each["phase"] for each in legs.values()} == {"healthy"}
    assert "router-0" in place.pdctl("status", "SPEC").stdout
    assert place.pdctl("down", "SPEC").stdout == f"{place.name}: down\n"
    assert place.legs() == {}
    assert running(f"PDCTL_LEG={place.name}/prefill-0") == []
    assert place.pdctl("down", "SPEC").stdout == f"{place.name}: nothing to stop\n"
    assert "nothing runs" in place.pdctl("status", code=1).stderr


def test_up_again_changes_nothing(place: Place) -> None:
    place.pdctl("up", "SPEC")
    before = place.pids()
    again = place.pdctl("up", "SPEC")
    assert again.stderr.count("runs, unchanged") == 3
    assert place.pids() == before


def test_a_changed_spec_restarts_only_what_changed(place: Place) -> None:
    place.pdctl("up", "SPEC")
    before = place.pids()
    place.spec["decode"]["max_num_seqs"] = 4
    place.write()
    changed = place.pdctl("up", "SPEC")
    assert "decode-0: changed in the spec, restarting it" in changed.stderr
    after = place.pids()
    assert after["prefill-0"] == before["prefill-0"]
    assert after["router-0"] == before["router-0"]
    assert after["decode-0"] != before["decode-0"]


def test_bidir_off_restarts_all_legs(place: Place) -> None:
    place.pdctl("up", "SPEC")
    off = place.pdctl("up", "SPEC", "--bidir", "off")
    assert off.stderr.count("changed in the spec") == 3
    assert {each["bidirectional"] for each in place.legs().values()} == {False}


def test_a_leg_that_left_the_spec_is_stopped(place: Place) -> None:
    place.spec["decode"]["legs"].append(leg(*free_ports(2)))
    place.write()
    place.pdctl("up", "SPEC")
    del place.spec["decode"]["legs"][1]
    place.write()
    up = place.pdctl("up", "SPEC")
    assert "decode-1: no longer in the spec, stopping it" in up.stderr
    assert set(place.pids()) == {"prefill-0", "decode-0", "router-0"}
    assert running(f"PDCTL_LEG={place.name}/decode-1") == []


def test_a_leg_that_fails_is_named_with_its_reason(place: Place) -> None:
    place.spec["decode"]["env"] = {"FAKE_START": "fail"}
    place.write()
    up = place.pdctl("up", "SPEC", code=1)
    assert "decode-0: ended: ValueError: no room for the KV cache" in up.stderr
    assert f"log: {place.folder}/state/{place.name}/decode-0.log" in up.stderr
    assert "Traceback" not in up.stderr
    assert place.legs() == {}
    assert running(f"PDCTL_LEG={place.name}/prefill-0") == []
    assert "no room" in place.pdctl("logs", place.name, "decode-0").stdout


def test_a_failed_restart_leaves_the_other_legs_running(place: Place) -> None:
    place.pdctl("up", "SPEC")
    before = place.pids()
    place.spec["decode"]["env"] = {"FAKE_START": "fail"}
    place.write()
    place.pdctl("up", "SPEC", code=1)
    after = place.pids()
    assert after == {name: before[name] for name in ("prefill-0", "router-0")}


def test_a_leg_that_waits_for_ever_for_its_side_channel_is_not_waited_for(place: Place) -> None:
    place.spec["decode"]["env"] = {"FAKE_START": "no-side-channel"}
    place.write()
    up = place.pdctl("up", "SPEC", code=1)
    assert "decode-0: cannot start: zmq.error.ZMQError: Address already in use" in up.stderr


def test_a_leg_that_never_gets_healthy_runs_into_the_timeout(place: Place) -> None:
    place.spec["prefill"]["env"] = {"FAKE_START": "hang"}
    place.write()
    up = place.pdctl("up", "SPEC", "--timeout", "1", code=1)
    assert "prefill-0: not healthy after 1 s (not listening)" in up.stderr
    assert place.legs() == {}


def test_a_killed_up_forgets_nothing(place: Place) -> None:
    place.spec["prefill"]["env"] = {"FAKE_START": "hang"}
    place.write()
    up = place.start("up", "SPEC")
    until("decode is healthy", lambda: place.legs().get("decode-0", {}).get("phase") == "healthy")
    up.kill()
    up.communicate()
    legs = place.legs()
    assert legs["prefill-0"]["phase"] == "starting"
    assert legs["decode-0"]["phase"] == "healthy"
    place.pdctl("down", place.name)
    assert running(f"PDCTL_LEG={place.name}/prefill-0") == []
    assert running(f"PDCTL_LEG={place.name}/decode-0") == []


def test_an_interrupted_up_cleans_up(place: Place) -> None:
    place.spec["prefill"]["env"] = {"FAKE_START": "hang"}
    place.write()
    up = place.start("up", "SPEC")
    until("decode is healthy", lambda: place.legs().get("decode-0", {}).get("phase") == "healthy")
    up.send_signal(signal.SIGINT)
    _, stderr = up.communicate(timeout=30)
    assert up.returncode == 130
    assert "stopping what was started: prefill-0, decode-0" in stderr
    assert place.legs() == {}
    assert running(f"PDCTL_LEG={place.name}/decode-0") == []


def test_a_dead_leg_is_shown_and_healed(place: Place) -> None:
    place.pdctl("up", "SPEC")
    before = place.pids()
    os.kill(before["decode-0"], signal.SIGKILL)
    until("decode is dead", lambda: place.legs()["decode-0"]["phase"] == "dead")
    assert "dead" in place.pdctl("status", place.name, code=1).stdout
    healed = place.pdctl("up", "SPEC")
    assert "decode-0: does not run any more" in healed.stderr
    after = place.pids()
    assert after["prefill-0"] == before["prefill-0"]
    assert after["decode-0"] != before["decode-0"]
    assert {each["phase"] for each in place.legs().values()} == {"healthy"}


def test_deployments_side_by_side(place: Place) -> None:
    other = Place(place.folder)
    place.pdctl("up", "SPEC")
    other.pdctl("up", "SPEC")
    both = json.loads(place.pdctl("status", "--json").stdout)["legs"]
    assert {each["deployment"] for each in both} == {place.name, other.name}
    before = other.pids()
    place.pdctl("down", place.name)
    assert other.pids() == before
    assert {each["phase"] for each in other.legs().values()} == {"healthy"}


def test_down_ends_what_ignores_sigterm_and_what_left_the_session(place: Place) -> None:
    place.spec["prefill"]["env"] = {"FAKE_START": "stubborn"}
    place.write()
    place.pdctl("up", "SPEC")
    assert len(running(f"PDCTL_LEG={place.name}/prefill-0")) >= 3
    down = place.pdctl("down", place.name, "--grace", "0.5")
    assert "killing" in down.stderr
    assert running(f"PDCTL_LEG={place.name}/prefill-0") == []


def test_a_router_is_stopped_first_and_has_time_for_its_drain(place: Place) -> None:
    place.spec["router"]["drain_timeout"] = "45s"
    place.write()
    place.pdctl("up", "SPEC")
    stopping = [
        line for line in place.pdctl("down", place.name).stderr.splitlines() if "most" in line
    ]
    assert stopping == [
        "router-0: stopping, for at most 55 s",
        "prefill-0, decode-0: stopping, for at most 20 s",
    ]


def test_down_leaves_a_process_alone_that_is_not_of_its_start(place: Place) -> None:
    place.pdctl("up", "SPEC")
    stranger = subprocess.Popen(
        ["sleep", "100"], env={"PDCTL_LEG": f"{place.name}/prefill-0", "PDCTL_LAUNCH": "another"}
    )
    try:
        place.pdctl("down", place.name)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_taken_port_is_told_before_anything_starts(place: Place) -> None:
    with socket.create_server(("127.0.0.1", place.spec["decode"]["legs"][0]["port"])):
        up = place.pdctl("up", "SPEC", code=1)
    port = place.spec["decode"]["legs"][0]["port"]
    assert (
        f"decode-0: port {port} on 127.0.0.1 is taken by another process (pid {os.getpid()}:"
        in (up.stderr)
    )
    assert place.legs() == {}


def test_a_leg_of_another_machine_is_refused(place: Place) -> None:
    # TEST-NET-1 (RFC 5737) is nobody's address.
    for role in ("prefill", "decode"):
        place.spec[role]["legs"][0] |= {"host": "192.0.2.1"}
    place.write()
    up = place.pdctl("up", "SPEC", code=1)
    assert "prefill-0: 192.0.2.1 is not an address of this machine; use 'pdctl render'" in up.stderr


def test_one_up_at_a_time(place: Place) -> None:
    place.spec["prefill"]["env"] = {"FAKE_START": "hang"}
    place.write()
    first = place.start("up", "SPEC")
    until("it has started legs", place.legs)
    assert "another pdctl is changing" in place.pdctl("up", "SPEC", code=1).stderr
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=30)


def test_logs(place: Place) -> None:
    place.pdctl("up", "SPEC")
    log = place.folder / f"state/{place.name}/router-0.log"
    with log.open("a") as stream:
        stream.write("one\ntwo\nthree\n")
    assert place.pdctl("logs", "SPEC", "router-0", "-n", "2").stdout == "two\nthree\n"
    follow = place.start("logs", place.name, "router-0", "-n", "1", "-f")
    assert follow.stdout is not None
    assert follow.stdout.readline() == "three\n"
    with log.open("a") as stream:
        stream.write("four\n")
    assert follow.stdout.readline() == "four\n"
    follow.send_signal(signal.SIGINT)
    follow.communicate(timeout=30)
    assert follow.returncode == 130
    unknown = place.pdctl("logs", place.name, "decode-7", code=2)
    assert "there is decode-0, prefill-0, router-0" in unknown.stderr


def test_logs_of_earlier_starts_are_kept(place: Place) -> None:
    place.pdctl("up", "SPEC")
    log = place.folder / f"state/{place.name}/decode-0.log"
    log.write_text("the first start\n")
    place.spec["decode"]["max_num_seqs"] = 4
    place.write()
    place.pdctl("up", "SPEC")
    assert Path(f"{log}.1").read_text() == "the first start\n"


def test_a_broken_spec_does_not_keep_down_from_working(place: Place) -> None:
    place.pdctl("up", "SPEC")
    place.spec["router"]["prot"] = 1
    place.write()
    down = place.pdctl("down", "SPEC", code=2)
    assert "give the deployment's name" in down.stderr
    place.pdctl("down", place.name)
    assert place.legs() == {}


def test_a_damaged_record_is_one_clear_line(place: Place) -> None:
    place.pdctl("up", "SPEC")
    place.pdctl("down", place.name)
    record = place.folder / f"state/{place.name}/decode-0.json"
    record.write_text("{")
    status = place.pdctl("status", place.name, code=2)
    assert status.stderr.count("\n") == 1
    assert str(record) in status.stderr


def test_a_changed_leg_that_cannot_listen_costs_nothing_that_runs(place: Place) -> None:
    place.pdctl("up", "SPEC")
    before = place.pids()
    port = free_ports(1)[0]
    with socket.create_server(("127.0.0.1", port)):
        place.spec["decode"]["legs"][0]["port"] = port
        place.write()
        up = place.pdctl("up", "SPEC", code=1)
    assert f"port {port} on 127.0.0.1 is taken" in up.stderr
    assert place.pids() == before


def test_the_side_channel_is_looked_for_at_its_own_address(place: Place) -> None:
    place.spec["prefill"]["legs"][0]["side_channel_host"] = "127.0.0.2"
    place.write()
    port = place.spec["prefill"]["legs"][0]["side_channel_port"]
    with socket.create_server(("127.0.0.2", port)):
        up = place.pdctl("up", "SPEC", code=1)
    assert f"prefill-0: port {port} on 127.0.0.2 is taken" in up.stderr


def test_cores_that_are_not_there_are_told(place: Place) -> None:
    place.spec["prefill"]["cpus"] = "0,9990-9991"
    place.write()
    up = place.pdctl("up", "SPEC", code=1)
    assert "prefill-0: cpus 0,9990-9991: this machine lets us use no core 9990, 9991" in up.stderr


def test_an_interrupted_up_cleans_up_when_nobody_reads_its_output(place: Place) -> None:
    place.spec["prefill"]["env"] = {"FAKE_START": "hang"}
    place.write()
    up = place.start("up", "SPEC")
    until("decode is healthy", lambda: place.legs().get("decode-0", {}).get("phase") == "healthy")
    assert up.stdout is not None
    assert up.stderr is not None
    up.stdout.close()
    up.stderr.close()
    up.send_signal(signal.SIGINT)
    up.wait(timeout=30)
    assert running(f"PDCTL_LEG={place.name}/prefill-0") == []
    assert running(f"PDCTL_LEG={place.name}/decode-0") == []
    assert place.legs() == {}


def test_an_up_that_is_terminated_cleans_up(place: Place) -> None:
    place.spec["prefill"]["env"] = {"FAKE_START": "hang"}
    place.write()
    up = place.start("up", "SPEC")
    until("decode is healthy", lambda: place.legs().get("decode-0", {}).get("phase") == "healthy")
    up.terminate()
    up.communicate(timeout=30)
    assert up.returncode == 130
    assert place.legs() == {}


def test_a_state_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    place = Place(tmp_path)
    (tmp_path / "state").write_text("not a folder")
    for words in (["status"], ["status", place.name], ["down", place.name]):
        assert "Not a directory" in place.pdctl(*words, code=2).stderr


def test_names_that_are_none_are_refused(place: Place) -> None:
    place.pdctl("up", "SPEC")
    (place.folder / "state/secret.log").write_text("secret\n")
    assert "has no log of ../secret" in place.pdctl("logs", place.name, "../secret", code=2).stderr
    for name in ("", "..", "x" * 300):
        assert "is neither a deployment's name nor" in place.pdctl("down", name, code=2).stderr


def test_a_port_that_does_not_speak_http_is_told(place: Place) -> None:
    place.pdctl("up", "SPEC")
    router = place.legs()["router-0"]
    os.kill(router["pid"], signal.SIGSTOP)
    record = place.folder / f"state/{place.name}/router-0.json"
    port = free_ports(1)[0]
    with socket.create_server(("127.0.0.1", port)) as other:
        answer = threading.Thread(target=lambda: other.accept()[0].sendall(b"SSH-2.0\r\n\r\n"))
        answer.start()
        record.write_text(
            record.read_text().replace(f":{place.spec['router']['port']}", f":{port}")
        )
        status = place.pdctl("status", place.name, code=1)
        answer.join()
    assert "router-0: what listens there does not speak HTTP" in status.stdout


def test_status_is_whole_when_piped(place: Place) -> None:
    place.pdctl("up", "SPEC")
    shown = place.pdctl("status", place.name).stdout
    for leg_status in place.legs().values():
        assert leg_status["url"] in shown
        assert str(leg_status["pid"]) in shown


def test_an_unhealthy_engine_is_restarted(place: Place) -> None:
    place.pdctl("up", "SPEC")
    before = place.pids()
    record = place.folder / f"state/{place.name}/decode-0.json"
    port, router_port = place.spec["decode"]["legs"][0]["port"], free_ports(1)[0]
    refusing = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import http.server as h\n"
            "class No(h.BaseHTTPRequestHandler):\n"
            "    do_GET = lambda self: self.send_error(503)\n"
            f"h.HTTPServer(('127.0.0.1', {router_port}), No).serve_forever()",
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        record.write_text(record.read_text().replace(f":{port}", f":{router_port}"))
        until(
            "it calls itself unhealthy",
            lambda: place.legs()["decode-0"]["detail"] == "/health answers 503",
        )
        up = place.pdctl("up", "SPEC")
    finally:
        refusing.kill()
        refusing.wait()
    assert "decode-0: unhealthy (/health answers 503), restarting it" in up.stderr
    assert place.pids()["decode-0"] != before["decode-0"]
    assert place.pids()["prefill-0"] == before["prefill-0"]
