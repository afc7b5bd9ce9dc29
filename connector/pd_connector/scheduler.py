"""Scheduler side of the connector: each prompt's readback is decided once, proven
before it is asked for, and accounted for on the answer."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.logger import init_logger

from pd_connector.admit import Gate
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
from pd_connector.handover import Handovers
from pd_connector.identity import Identity
from pd_connector.kvcache import clippable_block_sizes, only_full_attention, why_not_read_back
from pd_connector.prompt import Prompt
from pd_connector.proof import block_size_of, packed
from pd_connector.readback import (
    Decision,
    blocks_of_tokens,
    decide,
    settled_tokens,
    tokens_held,
)
from pd_connector.seams import (
    BLOCKS_PROCESSED,
    UnsupportedVllmError,
    handle_keys,
    missing_attributes,
)
from pd_connector.secret import PROOFS, derived_key, load_secret
from pd_connector.settings import announce
from pd_connector.sidechannel import serve_side_channel

logger = init_logger("vllm.pd_connector.scheduler")


class PdPullScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """vLLM's pull scheduler; a readback that is declined or fails is recomputed."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        if missing := missing_attributes(self):
            raise UnsupportedVllmError(missing)
        secret = load_secret()
        key = derived_key(secret, PROOFS) if secret else b""
        self._identity = Identity(vllm_config.model_config, self.block_size, key)
        self._block_sizes = clippable_block_sizes(kv_cache_config)
        self._clips = only_full_attention(kv_cache_config)
        self.pending = Pending()
        keys = handle_keys(NixlPullConnectorScheduler)
        self._gate = Gate(secret, keys, self.decoder_kv_blocks_ttl, self.pending)
        self.leases = EngineLeases(vllm_config, engine_id, self.pending, self._block_sizes)
        self._prompts: dict[str, Prompt] = {}
        self._handovers = Handovers(
            self._gate, self._identity, self._get_remote_prefill_token_count
        )
        self._reads_back = bool(self.is_bidirectional_kv_xfer_enabled)
        if self._reads_back and (reason := why_not_read_back(self, kv_cache_config)):
            self._reads_back = False
            logger.warning("%s: %s", LOG_READBACK_UNSUPPORTED, reason)
        announce(logger, vllm_config, self._reads_back, self._gate.signs)

    def on_new_request(self, request: Any) -> None:
        refusal = self._gate.admit(request)
        if refusal and (request.kv_transfer_params or {}).get(DO_REMOTE_DECODE):
            self._prompts[request.request_id] = Prompt(
                request, refusal=refusal, settled=True, outcome=Outcome.FAILED
            )
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self.leases.pins.wanted(request)
        params = request.kv_transfer_params
        if not params:
            return 0, False
        if params.get(DO_REMOTE_PREFILL):
            if self._handovers.refused(request):
                return 0, False
            matched: tuple[int, bool] = super().get_num_new_matched_tokens(
                request, num_computed_tokens
            )
            return matched
        if not params.get(DO_REMOTE_DECODE):
            return 0, False
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            prompt = self._prompts[request.request_id] = Prompt(request)
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
            self._gate.use(params)
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
                prompt.account()
        self.leases.pins.freed(connector_output.finished_sending or ())

    def _nixl_handshake_listener(
        self, encoded_data: Any, ready_event: Any, stop_event: Any, host: str, port: int
    ) -> None:
        serve_side_channel(
            encoded_data, ready_event, stop_event, host, port, self.leases.answers.answer
        )

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
        prompt_ids = self._handovers.over(request.request_id)
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is not None:
            return self._prompt_finished(prompt, block_ids)
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
        answer[PD_TOKENS] = self._identity.proof(request, tokens, prompt_ids)
        self.leases.pins.finished(
            request.request_id,
            request.kv_transfer_params,
            answer,
            block_ids,
            tokens,
            self._reqs_need_send[request.request_id],
        )
        self._gate.sign(answer)
        return held, answer

    def _prompt_finished(
        self, prompt: Prompt, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Prefill's handle holds the prompt alone, also if it was asked for more tokens."""
        request = prompt.request
        self.leases.prompt_finished(prompt)
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        block_ids = blocks_of_tokens(block_ids, self._block_sizes, tokens)
        held, answer = super().request_finished(request, block_ids)
        if answer is None:
            return held, None
        if held:
            answer[REMOTE_NUM_TOKENS] = tokens
            answer[PD_TOKENS] = self._identity.prompt_proof(request, tokens, prompt.ids)
            self._gate.sign(answer)
        answer[PD_REUSE] = reuse_of(prompt)
        if previous := request.kv_transfer_params.get(REMOTE_REQUEST_ID):
            answer[PD_PREVIOUS] = previous
        return held, answer

    def _decide(self, prompt: Prompt) -> Decision:
        request = prompt.request
        handle = request.kv_transfer_params
        prompt.offered = tokens_held(handle)
        if prompt.offered and not prompt.refusal and self._gate.was_used(handle):
            prompt.refusal = self._gate.refused(request, "used", "its handle was read before")
            return Decision(Outcome.FAILED)
        if self._reads_back and (reason := self._why_not_readable(handle)):
            return Decision(Outcome.DISABLED, reason=reason)

        def proven() -> int:
            if prompt.proven is None:
                prompt.proven = self._proven(prompt)
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

    def _proven(self, prompt: Prompt) -> int:
        """Tokens of a handle that can be read for a prompt: all, or whole blocks."""
        request, held = prompt.request, prompt.offered
        prompt.ids = packed(request.prompt_token_ids or ())
        proven = self._identity.proven(request, request.kv_transfer_params, held, prompt.ids)
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
        handle = prompt.request.kv_transfer_params
        if not num_external_tokens and decision.releases_handle:
            self.leases.reads.forget_claim(prompt.request.request_id)
        if decision.tokens:
            self._clip(handle, decision.kept)
        if decision.tokens or decision.releases_handle:
            self._gate.use(handle)
        else:
            handle[BLOCKS_PROCESSED] = True

    def _clip(self, handle: dict[str, Any], tokens: int) -> None:
        """Drop the blocks past ``tokens``: the worker pairs from the end of the list."""
        size = block_size_of(handle.get(PD_TOKENS))
        groups = handle[REMOTE_BLOCK_IDS]
        if tokens < tokens_held(handle) and size is not None:
            handle[REMOTE_BLOCK_IDS] = blocks_of_tokens(groups, [size] * len(groups), tokens)
