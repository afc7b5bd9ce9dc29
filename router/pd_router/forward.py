"""Which of a client's headers an engine may see; any other could steer it."""

from collections.abc import Mapping

from pd_router.body import REQUEST_ID_HEADER, safe_request_id

FORWARDED_HEADERS = ("Authorization", REQUEST_ID_HEADER, "traceparent", "tracestate")


def engine_headers(sent: Mapping[str, str]) -> dict[str, str]:
    """Those of a request's headers that go to an engine."""
    headers = {}
    for name in FORWARDED_HEADERS:
        value = sent.get(name)
        if value is None or not value.isascii():
            continue
        if name != REQUEST_ID_HEADER or safe_request_id(value):
            headers[name] = value
    return headers
