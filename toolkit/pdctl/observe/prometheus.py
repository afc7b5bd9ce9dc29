"""Asking a Prometheus, over its HTTP API (v1)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from pdctl.errors import PdctlError
from pdctl.spec.units import parse_duration

_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class Series:
    """Labels, and points of Unix time and value; an instant query has one point."""

    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def value(self) -> float:
        """The last value."""
        return self.points[-1][1]

    @property
    def has_data(self) -> bool:
        return any(not math.isnan(value) for _, value in self.points)


class Prometheus:
    """One Prometheus.

    Every method raises PdctlError, with the URL and the reason in one line, when it cannot be
    asked or refuses the query.
    """

    def __init__(self, url: str, client: httpx.Client | None = None):
        self.url = url.rstrip("/")
        self._client = client or httpx.Client(timeout=_TIMEOUT_SECONDS, trust_env=False)

    def instant(self, expr: str, time: float | None = None) -> list[Series]:
        """Series of the query now, or at a Unix time."""
        asked = {"query": expr} | ({} if time is None else {"time": f"{time:.3f}"})
        data = self._get("query", asked)
        if data["resultType"] == "scalar":
            return [_series({"metric": {}, "value": data["result"]})]
        return [_series(row) for row in data["result"]]

    def range(self, expr: str, start: float, end: float, step: float) -> list[Series]:
        """Series of the query between two Unix times, ``step`` seconds apart."""
        asked = {"query": expr, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"}
        return [_series(row) for row in self._get("query_range", asked)["result"]]

    def names(self) -> set[str]:
        """All metric names it has samples of."""
        return set(self._get("label/__name__/values", {}))

    def rules(self) -> list[dict[str, Any]]:
        """The rules it evaluates, as the API has them."""
        groups: Iterable[dict[str, Any]] = self._get("rules", {})["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def alerts(self) -> list[dict[str, Any]]:
        """Its pending and firing alerts, as the API has them."""
        found: list[dict[str, Any]] = self._get("alerts", {})["alerts"]
        return found

    def scrape_interval(self, job: str) -> float:
        """Seconds between two scrapes of a job's targets; the longest, 15 when there are none."""
        found = self._get("targets", {})["activeTargets"]
        spans = [each["scrapeInterval"] for each in found if each["scrapePool"] == job]
        return max(map(parse_duration, spans), default=15.0)

    def exemplars(self, expr: str, start: float, end: float) -> list[dict[str, Any]]:
        """Exemplars of the series in a query, as the API has them."""
        asked = {"query": expr, "start": f"{start:.3f}", "end": f"{end:.3f}"}
        found: list[dict[str, Any]] = self._get("query_exemplars", asked)
        return found

    def _get(self, path: str, asked: dict[str, str]) -> Any:
        url = f"{self.url}/api/v1/{path}"
        try:
            # A form, since queries can be longer than a URL may be.
            if asked:
                answer = self._client.post(url, data=asked)
            else:
                answer = self._client.get(url)
            body = answer.json()
        except httpx.ConnectError as error:
            raise PdctlError(
                f"{self.url}: {error}; 'pdctl observe up SPEC' runs a Prometheus, --prometheus "
                "says where another is"
            ) from None
        except httpx.HTTPError as error:
            raise PdctlError(f"{self.url}: {error or type(error).__name__}") from None
        except (httpx.InvalidURL, UnicodeError) as error:
            raise PdctlError(f"{self.url} is not a URL: {error}", 2) from None
        except ValueError:
            raise PdctlError(
                f"{url} answers {answer.status_code} and no JSON: is that a Prometheus?"
            ) from None
        if not isinstance(body, dict) or body.get("status") != "success":
            reason = body.get("error", body) if isinstance(body, dict) else body
            raise PdctlError(f"{self.url}: {reason}")
        return body["data"]


def _series(row: dict[str, Any]) -> Series:
    points = row["values"] if "values" in row else [row["value"]]
    return Series(row["metric"], tuple((float(at), float(value)) for at, value in points))
