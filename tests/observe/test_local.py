"""`pdctl observe up` and `down`: what they start they stop, and nothing else."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client import CollectorRegistry, start_http_server

from pdctl.launch.processes import find
from pdctl.observe.local import watch_state
from pdctl.observe.prometheus import Prometheus
from tests.cli import Ended, pdctl
from tests.observe.conftest import quick_spec
from tests.ports import free_ports
from tests.programs import program
from tests.waiting import until


@pytest.fixture
def spec(no_state: Path, tmp_path: Path) -> Iterator[Path]:
    for name in ("prometheus", "prometheus-alertmanager"):
        program(name)
    path, _ = quick_spec(tmp_path, "alone")
    yield path
    pdctl("observe", "down", "alone")


def ok(ended: Ended) -> list[str]:
    assert ended.code == 0, ended.err
    return [line.split(",")[0] for line in ended.out.splitlines()]


def pid(name: str) -> int:
    record = watch_state("alone").records()[name]
    return find([record.launch_id])[record.launch_id][0]


def test_up_twice_changed_killed_down(spec: Path) -> None:
    assert ok(pdctl("observe", "up", spec)) == ["alertmanager: started", "prometheus: started"]
    assert ok(pdctl("observe", "up", spec)) == [
        "alertmanager: runs already",
        "prometheus: runs already",
    ]
    spec.write_text(spec.read_text().replace("alert_window: 10s", "alert_window: 11s"))
    assert ok(pdctl("observe", "up", spec)) == ["alertmanager: restarted", "prometheus: restarted"]
    os.kill(pid("prometheus"), signal.SIGKILL)
    record = watch_state("alone").records()["prometheus"]
    until("it has ended", lambda: not find([record.launch_id])[record.launch_id])
    assert ok(pdctl("observe", "up", spec)) == [
        "alertmanager: runs already",
        "prometheus: started",
    ]
    urls = [watch_state("alone").records()[name].url for name in ("prometheus", "alertmanager")]
    assert [httpx.get(f"{url}/-/ready", trust_env=False).status_code for url in urls] == [200, 200]
    assert ok(pdctl("observe", "down", spec)) == ["alertmanager: stopped", "prometheus: stopped"]
    for url in urls:
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/-/ready", trust_env=False)
    assert pdctl("observe", "down", spec).out == ""


def test_a_router_that_speaks_tls_is_scraped(spec: Path, tmp_path: Path) -> None:
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=router"
    words += f" -addext subjectAltName=IP:127.0.0.1 -keyout {tmp_path}/k.pem -out {tmp_path}/c.pem"
    subprocess.run(words.split(), check=True, capture_output=True)
    told = yaml.safe_load(spec.read_text())
    told["router"] |= {"tls_certificate": "c.pem", "tls_key": "k.pem"}
    spec.write_text(yaml.safe_dump(told))
    server, thread = start_http_server(
        told["router"]["port"],
        "127.0.0.1",
        CollectorRegistry(),
        certfile=str(tmp_path / "c.pem"),
        keyfile=str(tmp_path / "k.pem"),
    )
    try:
        ok(pdctl("observe", "up", spec))
        prometheus = Prometheus(watch_state("alone").records()["prometheus"].url)
        until("the router is scraped", lambda: prometheus.instant('up{leg="router-0"} == 1'))
    finally:
        server.shutdown()
        thread.join()


def test_another_prometheus_is_left_alone(spec: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    config = tmp_path / "other.yml"
    config.write_text("{}")
    with (tmp_path / "other.log").open("wb") as log:
        other = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={config}",
                f"--storage.tsdb.path={tmp_path / 'other'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=log,
        )
    try:
        ok(pdctl("observe", "up", spec))
        ok(pdctl("observe", "down", spec))
        assert other.poll() is None
    finally:
        other.terminate()
        other.wait(30)


def test_a_taken_port_is_one_line(spec: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        lines = [
            f"      prometheus_port: {port}" if "prometheus_port" in line else line
            for line in spec.read_text().splitlines()
        ]
        spec.write_text("\n".join(lines).replace("      prometheus", "    prometheus"))
        ended = pdctl("observe", "up", spec)
    assert ended.code == 1
    assert len(ended.lines) == 1
    assert ended.lines[0].startswith(
        f"prometheus: port {port} on 127.0.0.1 is taken by another process"
    )


def test_legs_and_watchers_are_apart(spec: Path) -> None:
    """`pdctl status` tells of legs; what watches them is no leg."""
    ok(pdctl("observe", "up", spec))
    assert pdctl("status", "alone").lines == ["alone: nothing runs"]
