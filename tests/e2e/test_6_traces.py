"""A turn's trace over OTLP/HTTP: the router's spans, the connector's, vLLM's own."""

import secrets
from collections import Counter

import pytest

from pd_connector import contract
from pdctl.conversation import user_text
from tests.waiting import until

from .pair import TOKENS, Pair

pytestmark = pytest.mark.e2e_observability

SPANS = Counter(
    ["pd.turn", "pd.claim", "pd.prefill", "pd.decode", "pd.decision"]
    + ["pd.transfer", "llm_request"] * 2
)


def test_one_endpoint_in_the_spec_leads_all_spans_over_http(pair: Pair) -> None:
    url, conversation = pair.deployment.router_url, secrets.token_hex(8)
    prompt = user_text(conversation, 600)
    first = pair.post(url, None, prompt, TOKENS, conversation_id=conversation)
    prompt += first.json()["choices"][0]["text"] + user_text("more", 200)
    trace = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01"}
    second = pair.post(url, None, prompt, TOKENS, conversation_id=conversation, headers=headers)
    assert second.headers[contract.HEADER_REUSE] == "hit"

    def received() -> Counter[str]:
        return Counter(span.name for span in pair.receiver.spans if span.trace_id == trace)

    until("the trace is whole", lambda: received() >= SPANS)
    assert received() == SPANS
