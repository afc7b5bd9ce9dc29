"""Putting folder, data sources and dashboards into a Grafana, over its HTTP API.

Own code over httpx: grafana-client brings urllib3-future, which overwrites the urllib3 that
vLLM's environment uses.
"""

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from pdctl.errors import PdctlError
from pdctl.observe.stack import dashboards, data_sources
from pdctl.spec.model import Spec

_SHOWN_DIFFERENCES = 20
_VALUE_LENGTH = 60
_GRAFANAS_OWN = ("id", "version")


@dataclass(frozen=True)
class Change:
    """What was done to one object, or would be."""

    action: Literal["create", "update", "unchanged"]
    kind: str
    name: str
    difference: tuple[str, ...] = ()


class Grafana:
    """One Grafana.

    Every method raises PdctlError, one line, when it cannot be asked or refuses.
    """

    def __init__(self, url: str, token: str, ca: Path | None = None):
        self.url = url.rstrip("/")
        try:
            context = ssl.create_default_context(cafile=ca)
        except (OSError, ssl.SSLError) as error:
            raise PdctlError(f"{ca}: no CA certificates: {error}", 2) from None
        self._client = httpx.Client(
            timeout=30.0,
            trust_env=False,
            verify=context,
            headers={"Authorization": f"Bearer {token}"},
        )

    def get(self, path: str) -> dict[str, Any] | None:
        """The JSON there, or None when there is none (404)."""
        answer = self._ask("GET", path)
        return None if answer.status_code == 404 else _json(answer)

    def send(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._ask(method, path, body)
        if answer.status_code == 404:
            raise PdctlError(f"{self.url}{path}: not found (404)")
        return _json(answer)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            answer = self._client.request(method, f"{self.url}{path}", json=body)
        except httpx.HTTPError as error:
            raise PdctlError(f"{self.url}: {_why(error)}") from None
        except (httpx.InvalidURL, UnicodeError) as error:
            raise PdctlError(f"{self.url} is not a URL: {error}", 2) from None
        if answer.status_code == 401:
            raise PdctlError(f"{self.url}: Grafana does not know the token in GRAFANA_TOKEN (401)")
        if answer.status_code == 403:
            raise PdctlError(
                f"{self.url}: the token may not {method} {path} (403): {_said(answer)}; "
                "give its service account the role Editor, or Admin for data sources"
            )
        if answer.is_redirect:
            raise PdctlError(
                f"{self.url}: redirects to {answer.headers.get('location', '')}; give that URL"
            )
        if answer.status_code >= 400 and answer.status_code != 404:
            raise PdctlError(f"{self.url}: {method} {path}: {_said(answer)} ({answer.status_code})")
        return answer


def push_all(grafana: Grafana, folder: str, spec: Spec | None, dry_run: bool) -> Iterator[Change]:
    """Bring a Grafana into the wanted state; one change per object, also of the unchanged.

    Args:
        folder: title of the folder; made when missing.
        spec: whose data sources are pushed too; None pushes dashboards alone.
    """
    if grafana.get("/api/health") is None:
        raise PdctlError(
            f"{grafana.url}: no Grafana there (404 on /api/health); does its URL have a sub-path?"
        )
    uid = _folder_uid(folder)
    yield _folder(grafana, uid, folder, dry_run)
    for source in data_sources(spec) if spec else []:
        yield _data_source(grafana, source, dry_run)
    for name, dashboard in dashboards(spec).items():
        yield _dashboard(grafana, name, dashboard, uid, dry_run)


def _folder(grafana: Grafana, uid: str, title: str, dry_run: bool) -> Change:
    if grafana.get(f"/api/folders/{uid}") is not None:
        return Change("unchanged", "folder", title)
    if not dry_run:
        grafana.send("POST", "/api/folders", {"uid": uid, "title": title})
    return Change("create", "folder", title)


def _data_source(grafana: Grafana, wanted: dict[str, Any], dry_run: bool) -> Change:
    path = f"/api/datasources/uid/{wanted['uid']}"
    there = grafana.get(path)
    if there is None:
        if not dry_run:
            grafana.send("POST", "/api/datasources", wanted)
        return Change("create", "data source", wanted["name"])
    difference = _differences(there, wanted)
    if not difference:
        return Change("unchanged", "data source", wanted["name"])
    if not dry_run:
        # What somebody added beside ours, such as a password, stays.
        settings = {**there.get("jsonData", {}), **wanted["jsonData"]}
        grafana.send("PUT", path, {**there, **wanted, "jsonData": settings})
    return Change("update", "data source", wanted["name"], difference)


def _dashboard(
    grafana: Grafana, name: str, wanted: dict[str, Any], folder: str, dry_run: bool
) -> Change:
    there = grafana.get(f"/api/dashboards/uid/{wanted['uid']}")
    body = {"folderUid": folder, "message": "pdctl dashboards push", "overwrite": False}
    if there is None:
        if not dry_run:
            grafana.send(
                "POST", "/api/dashboards/db", {**body, "dashboard": {**wanted, "id": None}}
            )
        return Change("create", "dashboard", name)
    current = there["dashboard"]
    difference = _differences(current, wanted)
    if there.get("meta", {}).get("folderUid", folder) != folder:
        difference = (f"folder: {there['meta']['folderUid']} -> {folder}", *difference)
    if not difference:
        return Change("unchanged", "dashboard", name)
    if not dry_run:
        # With its id and version, Grafana refuses when somebody saves at the same moment.
        own = {key: current[key] for key in _GRAFANAS_OWN if key in current}
        grafana.send("POST", "/api/dashboards/db", {**body, "dashboard": {**wanted, **own}})
    return Change("update", "dashboard", name, difference)


def _differences(there: Any, wanted: Any) -> tuple[str, ...]:
    lines = list(_walk(there, wanted, ""))
    rest = len(lines) - _SHOWN_DIFFERENCES
    return (*lines[:_SHOWN_DIFFERENCES], *([f"and {rest} more"] if rest > 0 else []))


def _walk(there: Any, wanted: Any, where: str) -> Iterator[str]:
    """Where the wanted value is not what is there; keys that only Grafana has do not count."""
    if isinstance(wanted, dict) and isinstance(there, dict):
        for key in wanted:
            if where or key not in _GRAFANAS_OWN:
                yield from _walk(there.get(key), wanted[key], f"{where}.{key}" if where else key)
    elif isinstance(wanted, list) and isinstance(there, list) and len(wanted) == len(there):
        for index, (one, other) in enumerate(zip(there, wanted, strict=True)):
            yield from _walk(one, other, f"{where}[{index}]")
    elif there != wanted:
        yield f"{where}: {_short(there)} -> {_short(wanted)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _VALUE_LENGTH else f"{text[:_VALUE_LENGTH]}..."


def _folder_uid(title: str) -> str:
    """A uid such as Grafana allows: letters, digits, '-' and '_', at most 40."""
    uid = "".join(each if each.isascii() and each.isalnum() else "-" for each in title.lower())
    return uid.strip("-")[:40] or "pdctl"


def _why(error: httpx.HTTPError) -> str:
    text = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        reason = text.partition("certificate verify failed: ")[2].partition(" (_ssl")[0]
        return f"its certificate is not trusted ({reason or text}); give its CA with --ca"
    if "SSL" in text or "TLS" in text:
        return f"TLS failed ({text}); is that port http, not https?"
    return text


def _said(answer: httpx.Response) -> str:
    try:
        body = answer.json()
    except ValueError:
        return answer.reason_phrase
    return str(body.get("message", body)) if isinstance(body, dict) else str(body)


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise PdctlError(f"{answer.url}: answers no JSON object: is that a Grafana?")
    return body
