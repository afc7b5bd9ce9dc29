"""A fake engine process that is started with vLLM's own command line: it says in its log what the
real one with pdctl's connector says of its settings, listens where its NIXL side channel would,
and serves tests/fake_engine.py. No model, no NIXL."""

import argparse
import json
import os
import socket
import threading
import time

from pd_connector import contract
from tests.fake_engine import FakeEngine

_LISTENING: list[socket.socket] = []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kv-transfer-config", type=json.loads, required=True)
    args, _ = parser.parse_known_args()
    config = args.kv_transfer_config
    extra = config["kv_connector_extra_config"]
    stock = "kv_connector_module_path" not in config
    say("(APIServer pid=1) INFO 11-30 12:00:00 [api_utils.py:1] vLLM server version 0.29.0")
    plugins = os.environ.get("VLLM_PLUGINS")
    if not stock:
        say(
            f"(EngineCore pid=2) INFO 11-30 12:00:00 [settings.py:1] "
            f"{contract.LOG_CONNECTOR_ACTIVE}: role={config['kv_role']} "
            f"bidirectional={extra['bidirectional_kv_xfer']} "
            f"kv_recompute_threshold={extra['kv_recompute_threshold']} "
            f"decoder_kv_blocks_ttl={extra['decoder_kv_blocks_ttl']} "
            f"kv_load_failure_policy={config['kv_load_failure_policy']} readback=on signed=off"
        )
    side_channel()
    streams = plugins is None or contract.PLUGIN_NAME in plugins.split(",")
    if streams:
        say(f"(APIServer pid=1) INFO 11-30 12:00:00 [plugin.py:1] {contract.LOG_STREAM_ACTIVE}")
    say("(APIServer pid=1) INFO 11-30 12:00:00 [api_server.py:1] Starting vLLM server on http")
    role = "prefill" if config["kv_role"] == "kv_producer" else "decode"
    engine = FakeEngine(role, ttl=float(extra["decoder_kv_blocks_ttl"]), stock=stock)
    engine.start(args.port)
    threading.Event().wait()


def side_channel() -> None:
    host = os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"]
    port = int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"])
    try:
        _LISTENING.append(socket.create_server((host, port)))
    except OSError as error:
        say(
            f"(EngineCore pid=2) zmq.error.ZMQError: {os.strerror(error.errno or 0)} (addr='tcp://{host}:{port}')"
        )
        time.sleep(3600)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
