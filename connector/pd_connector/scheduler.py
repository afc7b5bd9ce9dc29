"""Scheduler side of the connector: each prompt's readback is decided once, proven
before it is asked for, and accounted for on the answer."""

import time
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.logger import init_logger

from pd_connector.contract import (
    DO_REMOTE_DECODE,
    DO_REMOTE_PREFILL,
    LOG_READBACK_UNSUPPORTED,
    PD_PREVIOUS,
    PD_REUSE,
    PD_TOKENS,
    REMOTE_BLOCK_IDS,
    REMOTE_NUM_TOKENS,
    REMOTE_REQUEST_ID,
    Outcome,
)
from pd_connector.counters import Pending
from pd_connector.engine import EngineLeases, refused, reuse_of
from pd_connector.handshake import PARAMETERS, serve_handshakes
from pd_connector.identity import Identity
from pd_connector.kvcache import (
    clippable_block_sizes,
    only_full_attention,
    why_not_read_back,
)
from pd_connector.params import ParamsError, check_params
from pd_connector.proof import block_size_of
from pd_connector.readback import (
    Decision,
    blocks_of_tokens,
    decide,
    settled_tokens,
    tokens_held,
)
from pd_connector.reads import Reading
from pd_connector.seams import (
    BLOCKS_PROCESSED,
    UnsupportedVllmError,
    handle_keys,
    handshake_parameters,
    missing_attributes,
)
from pd_connector.secret import PROOFS, derived_key, load_secret
from pd_connector.settings import announce
from pd_connector.signature import Signer, UsedHandles
from pd_connector.telemetry import ENGINE_REFUSED

logger = init_logger("vllm.pd_connector.scheduler")

LEAST_MEMORY_SECONDS = 3600.0
"""How long at least a used handle is remembered."""
_ANSWERS_CLAIMS = handshake_parameters(NixlPullConnectorScheduler) == PARAMETERS
"""Whether the side channel's listener can be ours."""


@dataclass
class Prompt:
    """One prompt's way through the prefill leg."""

    request: Any
    decision: Decision | None = None
    refused: str = ""
    """Why its handle was not taken."""
    proven: int | None = None
    """Tokens of the handle that are proven to be the prompt's, once they were compared."""
    local_tokens: int = 0
    """Tokens in the leg's own prefix cache when the readback was decided."""
    settled: bool = False
    """Blocks were allocated on the decision: it is not taken again."""
    reading: int = 0
    """Tokens being read."""
    tokens_read: int = 0
    arrived: int = field(default_factory=time.time_ns)
    refusal: str = ""
    """Why decode did not let the handle be read."""
    read: Reading | None = None
    expired: bool = False
    outcome: Outcome = Outcome.MISS


class PdPullScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """vLLM's pull scheduler; a readback that is declined or fails is recomputed."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        if missing := missing_attributes(self):
            raise UnsupportedVllmError(missing)
        secret = load_secret()
        self._signer = Signer(secret) if secret else None
        self._identity = Identity(
            vllm_config.model_config,
            self.block_size,
            derived_key(secret, PROOFS) if secret else b"",
        )
        self._handle_keys = handle_keys(NixlPullConnectorScheduler)
        self._block_sizes = clippable_block_sizes(kv_cache_config)
        self._clips = only_full_attention(kv_cache_config)
        self.pending = Pending()
        self.leases = EngineLeases(
            vllm_config, engine_id, self.pending, self._block_sizes, _ANSWERS_CLAIMS
        )
        self._prompts: dict[str, Prompt] = {}
        self._unlike_prefill: dict[str, bool] = {}
        self._used = UsedHandles(max(LEAST_MEMORY_SECONDS, 2 * self.decoder_kv_blocks_ttl))
        self._reads_back = bool(self.is_bidirectional_kv_xfer_enabled)
        if self._reads_back and (reason := why_not_read_back(self, kv_cache_config)):
            self._reads_back = False
            logger.warning("%s: %s", LOG_READBACK_UNSUPPORTED, reason)
        announce(logger, vllm_config, self._reads_back, self._signer is not None)

    if _ANSWERS_CLAIMS:

        def _nixl_handshake_listener(
            self, encoded_data: Any, ready_event: Any, stop_event: Any, host: str, port: int
        ) -> None:
            answer = self.leases.answers.answer
            serve_handshakes(encoded_data, ready_event, stop_event, host, port, answer)

    def on_new_request(self, request: Any) -> None:
        self._admit(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self.leases.pins.wanted(request)
        params = request.kv_transfer_params
        if not params:
            return 0, False
        if params.get(DO_REMOTE_PREFILL):
            if self._is_unlike_prefills(request):
                return 0, False
            matched: tuple[int, bool] = super().get_num_new_matched_tokens(
                request, num_computed_tokens
            )
            return matched
        if not params.get(DO_REMOTE_DECODE):
            return 0, False
        prompt = self._prompt_of(request)
        if prompt.settled or params.get(BLOCKS_PROCESSED):
            # Asked again after a failed read or a preemption. No second read will be
            # issued, so a request that waits for one would wait for ever.
            return 0, False
        prompt.local_tokens = num_computed_tokens
        decision = self._decide(prompt)
        if decision.outcome is Outcome.HIT and not prompt.refusal:
            claim = self.leases.reads.claim(request)
            if claim is None:
                return None, False
            if not claim.granted:
                prompt.refusal = claim.reason
                self.leases.prompt_refused(
                    request, refused(decision, claim.reason).outcome, claim.reason
                )
        prompt.decision = refused(decision, prompt.refusal)
        return prompt.decision.tokens, prompt.decision.tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.leases.pins.placed(request)
        params = request.kv_transfer_params
        prompt = self._prompts.get(request.request_id)
        if prompt is not None and not prompt.settled and prompt.decision is not None:
            self._settle(prompt, prompt.decision, num_external_tokens)
        elif params and self.is_bidirectional_kv_xfer_enabled:
            # Its blocks will be kept for a readback. Without this the worker does not
            # know the request, and its deadline would never come.
            self._reqs_in_batch.add(request.request_id)
        if params and params.get(DO_REMOTE_PREFILL):
            self._used.add(params, time.monotonic())
        if num_external_tokens:
            self.leases.reads.start(request)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        self.leases.command(meta)
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        report = getattr(connector_output, "kv_connector_worker_meta", None)
        if report is not None:
            self.leases.reads.ended(report.transfers)
            for request_id in report.expired:
                if prompt := self._prompts.get(request_id):
                    prompt.expired = True
        for request_id in connector_output.finished_recving or ():
            read = self.leases.reads.over(request_id)
            if prompt := self._prompts.get(request_id):
                prompt.read = read
                self._account(prompt)
        self.leases.pins.freed(connector_output.finished_sending or ())

    @property
    def may_sleep(self) -> bool:
        """Whether a step can wait while all requests are finished."""
        return not self._reqs_need_recv and not self._reqs_need_send

    def shutdown(self) -> None:
        self.leases.close()
        super().shutdown()

    def request_finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._unlike_prefill.pop(request.request_id, None)
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is not None:
            self.leases.prompt_finished(prompt)
            held, answer = super().request_finished(request, block_ids)
            if answer is not None:
                self._finish_prompt(prompt, answer)
            return held, answer
        tokens = settled_tokens(
            computed=request.num_computed_tokens,
            in_flight=getattr(request, "num_in_flight_tokens", 0),
            known=request.num_tokens,
        )
        block_ids = blocks_of_tokens(block_ids, self._block_sizes, tokens)
        held, answer = super().request_finished(request, block_ids)
        if answer is None or not answer.get(DO_REMOTE_DECODE):
            return held, answer
        if not held:
            return False, None
        answer[REMOTE_NUM_TOKENS] = tokens
        answer[PD_TOKENS] = self._identity.proof(request, tokens)
        self.leases.pins.finished(
            request.request_id,
            request.kv_transfer_params,
            answer,
            block_ids,
            tokens,
            self._reqs_need_send[request.request_id],
        )
        self._sign(answer)
        return held, answer

    def _finish_prompt(self, prompt: Prompt, answer: dict[str, Any]) -> None:
        tokens = min(answer.get(REMOTE_NUM_TOKENS) or 0, prompt.request.num_prompt_tokens)
        answer[PD_TOKENS] = self._identity.proof(prompt.request, tokens, whole_only=True)
        self._sign(answer)
        answer[PD_REUSE] = reuse_of(prompt)
        if previous := prompt.request.kv_transfer_params.get(REMOTE_REQUEST_ID):
            answer[PD_PREVIOUS] = previous

    def _sign(self, answer: dict[str, Any]) -> None:
        if self._signer is not None:
            answer.update(self._signer.signed(answer))

    def _admit(self, request: Any) -> None:
        """Take from a request what must not be acted on; it is answered without it."""
        params = request.kv_transfer_params
        if not params:
            return
        try:
            check_params(params, self._handle_keys)
        except ParamsError as error:
            request.kv_transfer_params = None
            self._refused(request, "malformed", str(error))
            return
        if self._signer is None or not params.get(REMOTE_BLOCK_IDS):
            return
        if refusal := self._signer.refusal(params):
            self._disarm(request, refusal)

    def _disarm(self, request: Any, reason: str) -> None:
        """Forget the handle of a request. Nobody is told: it may name another's blocks."""
        self._refused(request, reason, "its handle is not taken")
        prefills = bool(request.kv_transfer_params.get(DO_REMOTE_DECODE))
        request.kv_transfer_params = {
            DO_REMOTE_PREFILL: False,
            DO_REMOTE_DECODE: prefills,
            BLOCKS_PROCESSED: True,
        }
        if prefills:
            prompt = self._prompt_of(request)
            prompt.outcome = Outcome.FAILED
            prompt.decision = Decision(Outcome.FAILED, reason=f"handle refused: {reason}")
            prompt.settled = True

    def _refused(self, request: Any, reason: str, text: str) -> None:
        self.pending.add(ENGINE_REFUSED, reason)
        logger.warning("pd_connector: request %s: %s (%s)", request.request_id, text, reason)

    def _prompt_of(self, request: Any) -> Prompt:
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            prompt = self._prompts[request.request_id] = Prompt(request)
        return prompt

    def _decide(self, prompt: Prompt) -> Decision:
        handle = prompt.request.kv_transfer_params
        if not prompt.refused and tokens_held(handle) and handle in self._used:
            prompt.refused = "used"
            self._refused(prompt.request, "used", "its handle was read before")
        if prompt.refused:
            return Decision(Outcome.FAILED, reason=f"handle refused: {prompt.refused}")
        if self._reads_back and (reason := self._why_not_readable(handle)):
            return Decision(Outcome.DISABLED, reason=reason)

        def proven() -> int:
            if prompt.proven is None:
                prompt.proven = self._proven(prompt.request, handle)
            return prompt.proven

        return decide(
            handle,
            enabled=self._reads_back,
            threshold=self.kv_recompute_threshold,
            local_tokens=prompt.local_tokens,
            proven_tokens=proven,
        )

    def _why_not_readable(self, handle: dict[str, Any]) -> str:
        size = block_size_of(handle.get(PD_TOKENS))
        if size is None or self.block_size % size == 0:
            return ""
        return f"blocks of {size} tokens cannot be read into blocks of {self.block_size}"

    def _proven(self, request: Any, handle: dict[str, Any]) -> int:
        """Tokens of a handle that can be read for a request: all, or whole blocks."""
        held = tokens_held(handle)
        proven = self._identity.proven(request, handle, held)
        if proven == held:
            return held
        return proven // self.block_size * self.block_size if self._clips else 0

    def _settle(self, prompt: Prompt, decision: Decision, num_external_tokens: int) -> None:
        prompt.settled = True
        if decision.tokens and not num_external_tokens:
            # The scheduler preferred a longer hit in its own prefix cache.
            decision = Decision(Outcome.LOCAL_HIT)
        prompt.outcome = decision.outcome
        prompt.reading = num_external_tokens
        if not num_external_tokens and decision.releases_handle:
            self.leases.reads.forget_claim(prompt.request.request_id)
        handle = prompt.request.kv_transfer_params
        if decision.tokens:
            self._clip(handle, decision.kept)
        if decision.tokens or decision.releases_handle:
            self._used.add(handle, time.monotonic())
        else:
            handle[BLOCKS_PROCESSED] = True

    def _clip(self, handle: dict[str, Any], tokens: int) -> None:
        """Drop the blocks past ``tokens``: the worker pairs from the end of the list."""
        size = block_size_of(handle.get(PD_TOKENS))
        groups = handle[REMOTE_BLOCK_IDS]
        if tokens < tokens_held(handle) and size is not None:
            handle[REMOTE_BLOCK_IDS] = blocks_of_tokens(groups, [size] * len(groups), tokens)

    def _account(self, prompt: Prompt) -> None:
        """A read ended. The scheduler has already taken back what failed to load."""
        loaded = prompt.request.num_computed_tokens - prompt.local_tokens
        prompt.tokens_read = max(0, min(prompt.reading, loaded))
        if prompt.tokens_read < prompt.reading:
            prompt.outcome = Outcome.EXPIRED if prompt.expired else Outcome.FAILED
            _correct_counters(prompt)

    def _is_unlike_prefills(self, request: Any) -> bool:
        """Whether prefill's blocks hold another prompt than this one, as far as prefill says,
        or were read before."""
        known = self._unlike_prefill.get(request.request_id)
        if known is not None:
            return known
        handle = request.kv_transfer_params
        unlike = False
        if handle in self._used:
            self._disarm(request, "used")
            unlike = True
        elif PD_TOKENS in handle:
            held = tokens_held(handle)
            needed = self._get_remote_prefill_token_count(request.num_prompt_tokens)
            unlike = self._identity.proven(request, handle, held) < needed
            if unlike:
                self._refused(request, "history_changed", "prefill computed another prompt")
        self._unlike_prefill[request.request_id] = unlike
        return unlike


def _correct_counters(prompt: Prompt) -> None:
    """Take back from vLLM's prompt token counters what never came.

    vLLM counts a prompt's tokens by source when it asks for the read and counts them
    again only if nothing of the prompt is left.
    """
    request = prompt.request
    stats = getattr(request, "prefill_stats", None)
    if stats is not None:
        stats.set(
            num_prompt_tokens=request.num_prompt_tokens,
            num_local_cached_tokens=prompt.local_tokens,
            num_external_cached_tokens=prompt.tokens_read,
        )
