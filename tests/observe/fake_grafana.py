"""A fake of Grafana's HTTP API: folders, dashboards and data sources, in memory.

It follows what Grafana's OpenAPI description says of these endpoints: paths, fields, status codes,
service account tokens, versions that must match. It draws nothing and checks no dashboard.
"""

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

EDITOR, VIEWER = "glsa_editor", "glsa_viewer"


class FakeGrafana:
    """Serves below ``url``; ``writes`` are the requests that changed something."""

    def __init__(self, port: int, prefix: str = "", certificate: Path | None = None):
        self.folders: dict[str, dict[str, Any]] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.sources: dict[str, dict[str, Any]] = {}
        self.writes: list[str] = []
        self._prefix = prefix
        grafana = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                status, answer = grafana._answer(self.command, self.path, token, body)
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = _serve

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        scheme = "http"
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            scheme = "https"
        self.url = f"{scheme}://127.0.0.1:{port}{prefix}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, method: str, path: str, token: str, body: Any) -> tuple[int, Any]:
        if not path.startswith(f"{self._prefix}/api/"):
            return 404, {"message": "Not found"}
        path = path.removeprefix(f"{self._prefix}/api/")
        if path == "health":
            return 200, {"database": "ok", "version": "11.6.4"}
        if token not in (EDITOR, VIEWER):
            return 401, {"message": "Invalid API key", "messageId": "api-key.invalid"}
        if method != "GET":
            if token == VIEWER:
                need = "dashboards:create" if "dashboards" in path else "folders:create"
                return 403, {
                    "accessErrorId": "ACE0",
                    "message": f"You'll need additional permissions. Permissions needed: {need}",
                    "title": "Access denied",
                }
            self.writes.append(f"{method} {path}")
        return self._routed(method, path, body)

    def _routed(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        kind, _, rest = path.partition("/")
        uid = rest.removeprefix("uid/")
        if (method, kind) == ("GET", "folders"):
            found = self.folders.get(rest)
            return (200, found) if found else (404, {"message": "folder not found"})
        if (method, path) == ("POST", "folders"):
            if body["uid"] in self.folders:
                return 409, {"message": "a folder with that uid exists"}
            self.folders[body["uid"]] = {**body, "id": len(self.folders) + 1, "version": 1}
            return 200, self.folders[body["uid"]]
        if (method, path) == ("POST", "dashboards/db"):
            return self._save(body)
        if (method, kind) == ("GET", "dashboards"):
            found = self.dashboards.get(uid)
            return (200, found) if found else (404, {"message": "Dashboard not found"})
        if kind == "datasources":
            return self._source(method, uid, body)
        return 404, {"message": "Not found"}

    def _save(self, body: Any) -> tuple[int, Any]:
        dashboard, folder = dict(body["dashboard"]), body["folderUid"]
        if folder not in self.folders:
            return 400, {"message": "folder not found"}
        there = self.dashboards.get(dashboard["uid"])
        if there:
            saved = there["dashboard"]
            if not body["overwrite"] and dashboard.get("version") != saved["version"]:
                return 412, {
                    "message": "The dashboard has been changed by someone else",
                    "status": "version-mismatch",
                }
            version, number = saved["version"] + 1, saved["id"]
        else:
            version, number = 1, len(self.dashboards) + 1
        dashboard |= {"version": version, "id": number}
        self.dashboards[dashboard["uid"]] = {
            "dashboard": dashboard,
            "meta": {"folderUid": folder, "version": version},
        }
        return 200, {
            "id": number,
            "uid": dashboard["uid"],
            "status": "success",
            "version": version,
        }

    def _source(self, method: str, uid: str, body: Any) -> tuple[int, Any]:
        if method == "GET":
            found = self.sources.get(uid)
            return (200, found) if found else (404, {"message": "Data source not found"})
        if method == "PUT" and uid not in self.sources:
            return 404, {"message": "Data source not found"}
        version = self.sources.get(body["uid"], {}).get("version", 0) + 1
        self.sources[body["uid"]] = {
            **body,
            "id": len(self.sources) + 1,
            "version": version,
            "readOnly": False,
        }
        return 200, {"message": "Datasource saved", "datasource": self.sources[body["uid"]]}
