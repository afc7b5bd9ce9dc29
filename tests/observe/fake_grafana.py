"""A fake of Grafana's HTTP API: folders, dashboards, data sources and alert rules, in memory.

It follows what Grafana's OpenAPI description says of these endpoints: paths, fields, status codes,
service account tokens, versions that must match, provenance. It draws nothing, checks no dashboard
and evaluates no rule.
"""

import json
import re
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

EDITOR, VIEWER = "glsa_editor", "glsa_viewer"
NO_DATA_STATES = {"Alerting", "NoData", "OK", "KeepLast"}
ERROR_STATES = {"OK", "Alerting", "Error", "KeepLast"}


class FakeGrafana:
    """Serves below ``url``; ``writes`` are the requests that changed something."""

    def __init__(self, port: int, prefix: str = "", certificate: Path | None = None):
        self.folders: dict[str, dict[str, Any]] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.sources: dict[str, dict[str, Any]] = {}
        self.groups: dict[tuple[str, str], dict[str, Any]] = {}
        """Rule groups by uid of their folder and title."""
        self.refuses_rules = False
        """The token may do anything but that."""
        self.sent: dict[str, Any] = {}
        """The last rule group as it came."""
        self.writes: list[str] = []
        self.provenance = ""
        """Of what the present request writes."""
        self._prefix = prefix
        grafana = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                grafana.provenance = "" if "X-Disable-Provenance" in self.headers else "api"
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
        if match := re.fullmatch(r"v1/provisioning/folder/([^/]+)/rule-groups/([^/]+)", path):
            return self._group(method, (match[1], match[2]), body)
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

    def _group(self, method: str, key: tuple[str, str], body: Any) -> tuple[int, Any]:
        if self.refuses_rules:
            return 403, {"message": "Permissions needed: alert.provisioning:read"}
        if method == "GET":
            found = self.groups.get(key)
            return (200, found) if found else (404, {"message": "rule group not found"})
        if key[0] not in self.folders:
            return 400, {"message": "folder does not exist"}
        self.sent = body
        problem = self._wrong_group(key, body)
        if problem:
            return 400, {"message": f"invalid alert rule: {problem}"}
        for rule in self.groups.get(key, {}).get("rules", ()):
            if rule.get("provenance", "") not in ("", self.provenance):
                return 409, {
                    "message": f"cannot update with provided provenance '{self.provenance}', "
                    f"needs '{rule['provenance']}'"
                }
        uids = {rule["uid"] for rule in body["rules"]}
        for other, group in self.groups.items():
            if other != key:
                group["rules"] = [rule for rule in group["rules"] if rule["uid"] not in uids]
        rules = [self._stored(rule, key) for rule in body["rules"]]
        self.groups[key] = {
            "title": key[1],
            "folderUid": key[0],
            "interval": body["interval"],
            "rules": rules,
        }
        return 200, self.groups[key]

    def _stored(self, rule: Any, key: tuple[str, str]) -> dict[str, Any]:
        """With what Grafana adds, and a duration as Prometheus' library writes it."""
        data = [
            {**query, "model": {"intervalMs": 1000, "maxDataPoints": 43200, **query["model"]}}
            for query in rule["data"]
        ]
        stored = {"isPaused": False, **rule, "data": data, "folderUID": key[0], "ruleGroup": key[1]}
        stored |= {"id": 7, "orgID": 3, "updated": "2026-01-01T00:00:00Z"}
        stored["for"] = re.sub(r"^60m$", "1h", stored["for"])
        if self.provenance:
            stored["provenance"] = self.provenance
        return stored

    def _wrong_group(self, key: tuple[str, str], body: Any) -> str | None:
        """Why Grafana would not take it."""
        if not isinstance(body["interval"], int) or body["interval"] <= 0 or body["interval"] % 10:
            return "interval must be a multiple of 10 seconds"
        taken = {
            rule["title"]
            for (folder, title), group in self.groups.items()
            if folder == key[0] and title != key[1]
            for rule in group["rules"]
        }
        for rule in body["rules"]:
            lacks = {"orgID", "folderUID", "ruleGroup", "title", "condition", "data"} | {
                "noDataState",
                "execErrState",
                "for",
            }
            if lacks - rule.keys():
                return f"{lacks - rule.keys()} missing"
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", rule["uid"]):
                return "uid"
            if rule["title"] in taken or not 1 <= len(rule["title"]) <= 190:
                return "title"
            taken.add(rule["title"])
            if rule["condition"] not in {query["refId"] for query in rule["data"]}:
                return "condition"
            if not re.fullmatch(r"([0-9]+(ms|[smhdwy]))+|0", rule["for"]):
                return "for"
            if rule["noDataState"] not in NO_DATA_STATES:
                return "noDataState"
            if rule["execErrState"] not in ERROR_STATES:
                return "execErrState"
            for query in rule["data"]:
                if query["datasourceUid"] not in {*self.sources, "__expr__"}:
                    return "data source not found"
                if query["model"]["refId"] != query["refId"]:
                    return "refId"
        return None
