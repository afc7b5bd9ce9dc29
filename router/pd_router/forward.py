"""Which of a client's headers an engine may see; any other could steer it."""

from collections.abc import Mapping

from pd_router.body import REQUEST_ID_HEADER, safe_request_id

FORWARDED_HEADERS = ("Authorization", REQUEST_ID_HEADER, "traceparent", "tracestate")


def engine_headers(sent: Mapping[str, str]) -> dict[str, str]:
    """Those of a request's headers that go to an engine."""
    return {
        name: sent[name]
        for name in FORWARDED_HEADERS
        if name in sent
        and sent[name].isascii()
        and (name != REQUEST_ID_HEADER or safe_request_id(sent[name]))
    }
