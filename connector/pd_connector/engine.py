"""Leases, READs and telemetry of one engine core, as the scheduler side uses them."""

from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger

from pd_connector.claims import ANSWER_SECONDS, Claims
from pd_connector.contract import HIGH_WATER_KEY, REMOTE_ENGINE_ID, Outcome
from pd_connector.control import Answers, ask, claim_of, order_key
from pd_connector.counters import Pending
from pd_connector.leases import Claim, Leases
from pd_connector.pins import COMMANDS, HIGH_WATER, READ_SECONDS, Pins
from pd_connector.readback import Decision
from pd_connector.reads import Reading, Reads
from pd_connector.telemetry import (
    ENGINE_DECISIONS,
    ENGINE_DECLINED,
    ENGINE_REFUSED,
    ENGINE_SPANS_DROPPED,
    ENGINE_TOKENS,
    EVENT_DECLINED,
    OUTCOME,
    OUTCOME_REASON,
    SPAN_DECISION,
    TOKENS_COMPUTED,
    TOKENS_LOCAL,
    TOKENS_OFFERED,
    TOKENS_READ,
)
from pd_connector.tracing import Export, Spans, now, otlp_export

logger = init_logger("vllm.pd_connector.leases")

_GONE_BY_READER = ("read", "claimed", "used")


def refused(decision: Decision, refusal: str) -> Decision:
    """What a decision to read becomes when decode does not let it; unchanged without a refusal."""
    if not refusal or not decision.tokens:
        return decision
    by_reader = refusal in _GONE_BY_READER or refusal.startswith("unreachable")
    return Decision(Outcome.FAILED if by_reader else Outcome.EXPIRED, reason=refusal)


class EngineLeases:
    """What the scheduler of an engine core holds besides vLLM's own."""

    def __init__(
        self,
        vllm_config: Any,
        engine_id: str,
        pending: Pending,
        block_sizes: Sequence[int | None],
    ) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        self._pending = pending
        self._declined = 0
        self.table = table = Leases()
        high_water = float(extra.get(HIGH_WATER_KEY, HIGH_WATER))
        self.pins = Pins(table, pending, high_water, block_sizes)
        self.spans = Spans(
            _export(vllm_config, engine_id),
            lambda lost: pending.add(ENGINE_SPANS_DROPPED, amount=lost),
        )
        backends = extra.get("backends") or ["UCX"]
        self.reads = Reads(Claims(_claim, _give_back), pending, self.spans, str(backends[0]))
        self.answers = Answers(table, order_key(), self.pins.state)

    def command(self, meta: Any) -> None:
        """Put what the workers must know on the metadata of the step that is being built."""
        if (commands := self.pins.step()) is not None:
            setattr(meta, COMMANDS, commands)
        if seconds := self.reads.take_seconds():
            setattr(meta, READ_SECONDS, seconds)

    def prompt_refused(self, request: Any, outcome: Outcome, refusal: str) -> None:
        """Decode did not let a prompt's handle be read."""
        engine = request.kv_transfer_params.get(REMOTE_ENGINE_ID)
        if outcome is Outcome.EXPIRED:
            self._declined += 1
            logger.warning(
                "%s for %s from engine %s. (%s)",
                EVENT_DECLINED,
                request.request_id,
                engine,
                refusal,
            )
            return
        if refusal in _GONE_BY_READER:
            self._pending.add(ENGINE_REFUSED, "used")
        logger.warning(
            "No readback for %s from engine %s: %s.", request.request_id, engine, refusal
        )

    def take_declined(self) -> int:
        """Readbacks declined for expiry since the last call, for vLLM's own counter."""
        declined, self._declined = self._declined, 0
        return declined

    def prompt_finished(self, prompt: Any) -> None:
        """Count and tell what became of a prompt on the prefill leg (scheduler.Prompt)."""
        request = prompt.request
        if not prompt.settled:
            self.reads.drop(request.request_id)
            return
        self.reads.forget_claim(request.request_id)
        outcome: Outcome = prompt.outcome
        asked = prompt.offered
        computed = min(request.num_computed_tokens, request.num_prompt_tokens)
        computed = max(0, computed - prompt.tokens_read - prompt.local_tokens)
        self._pending.add(ENGINE_DECISIONS, outcome.value)
        for kind, tokens in (
            ("asked", asked),
            ("read", prompt.tokens_read),
            ("computed", computed),
            ("local", prompt.local_tokens),
        ):
            if tokens:
                self._pending.add(ENGINE_TOKENS, kind, amount=tokens)
        if outcome is Outcome.EXPIRED:
            self._pending.add(ENGINE_DECLINED)
        if not self.spans.on:
            return
        attributes = {
            OUTCOME: outcome.value,
            TOKENS_OFFERED: asked,
            TOKENS_READ: prompt.tokens_read,
            TOKENS_COMPUTED: computed,
            TOKENS_LOCAL: prompt.local_tokens,
        }
        if reason := reason_of(prompt):
            attributes[OUTCOME_REASON] = reason
        self.spans.add(
            SPAN_DECISION,
            getattr(request, "trace_headers", None),
            prompt.arrived,
            now(),
            attributes,
            EVENT_DECLINED if outcome is Outcome.EXPIRED else None,
        )

    def close(self) -> None:
        """Send the last spans and let go of threads."""
        self.reads.close()


def reason_of(prompt: Any) -> str:
    """Why a prompt has its outcome, in a few words; empty when the outcome says it all."""
    if prompt.refusal:
        return str(prompt.refusal)
    if prompt.expired:
        return "expired while it was read"
    return str(getattr(prompt.decision, "reason", "") or "")


def reuse_of(prompt: Any) -> dict[str, Any]:
    """The field of prefill's answer that tells what became of the prompt."""
    reuse: dict[str, Any] = {
        "outcome": prompt.outcome.value,
        "tokens_read": prompt.tokens_read,
    }
    if reason := reason_of(prompt):
        reuse["reason"] = reason
    read: Reading | None = prompt.read
    if read is not None and read.bytes:
        reuse |= {"read_ms": round(read.seconds * 1e3, 3), "read_bytes": read.bytes}
    return reuse


def _claim(host: str, port: int, turn: str, reader: str) -> Claim:
    return claim_of(ask(host, port, {"turn": turn, "reader": reader}, ANSWER_SECONDS))


def _give_back(host: str, port: int, turn: str, reader: str) -> None:
    ask(host, port, {"turn": turn, "reader": reader, "back": True}, ANSWER_SECONDS)


def _export(vllm_config: Any, engine_id: str) -> Export | None:
    observability = getattr(vllm_config, "observability_config", None)
    endpoint = getattr(observability, "otlp_traces_endpoint", None)
    if not endpoint:
        return None
    try:
        return otlp_export(endpoint, engine_id)
    except (ImportError, ValueError) as error:
        logger.warning("pd_connector: no spans: %s", error)
        return None
