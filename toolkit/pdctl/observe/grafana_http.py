"""A Grafana, over its HTTP API.

Own code over httpx: grafana-client brings urllib3-future, which overwrites the urllib3 that
vLLM's environment uses.
"""

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from pdctl.errors import PdctlError


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

    def send(
        self, method: str, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        answer = self._ask(method, path, body, headers)
        if answer.status_code == 404:
            raise PdctlError(f"{self.url}{path}: not found (404)")
        return _json(answer)

    def _ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        try:
            answer = self._client.request(method, f"{self.url}{path}", json=body, headers=headers)
        except httpx.HTTPError as error:
            raise PdctlError(f"{self.url}: {_why(error)}") from None
        except (httpx.InvalidURL, UnicodeError) as error:
            raise PdctlError(f"{self.url} is not a URL: {error}", 2) from None
        if answer.status_code == 401:
            raise PdctlError(f"{self.url}: Grafana does not know the token in GRAFANA_TOKEN (401)")
        if answer.status_code == 403:
            raise PdctlError(
                f"{self.url}: the token may not {method} {path} (403): {_said(answer)}; "
                "give its service account the role Editor, or Admin for data sources and alert "
                "rules"
            )
        if answer.is_redirect:
            raise PdctlError(
                f"{self.url}: redirects to {answer.headers.get('location', '')}; give that URL"
            )
        if answer.status_code >= 400 and answer.status_code != 404:
            raise PdctlError(f"{self.url}: {method} {path}: {_said(answer)} ({answer.status_code})")
        return answer


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
