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
    LOG_CONNECTOR_ACTIVE,
    LOG_READBACK_UNSUPPORTED,
    PD_PREVIOUS,
    PD_REUSE,
    PD_TOKENS,
    REMOTE_NUM_TOKENS,
    REMOTE_REQUEST_ID,
    Outcome,
)
from pd_connector.counters import Pending
from pd_connector.engine import EngineLeases, refused, reuse_of
from pd_connector.kvcache import clippable_block_sizes, why_reads_are_unsafe
from pd_connector.proof import make_proof, proof_matches, proof_seed, unprovable
from pd_connector.readback import (
    Decision,
    blocks_of_tokens,
    decide,
    settled_tokens,
    tokens_held,
)
from pd_connector.reads import Reading
from pd_connector.seams import BLOCKS_PROCESSED, UnsupportedVllmError, missing_attributes
from pd_connector.sidechannel import serve_side_channel

logger = init_logger("vllm.pd_connector.scheduler")


@dataclass
class Prompt:
    """One prompt's way through the prefill leg."""

    request: Any
    decision: Decision | None = None
    same_history: bool | None = None
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
        self._model = str(vllm_config.model_config.model)
        self._block_sizes = clippable_block_sizes(kv_cache_config)
        self.pending = Pending()
        self.leases = EngineLeases(vllm_config, engine_id, self.pending, self._block_sizes)
        self._prompts: dict[str, Prompt] = {}
        self._reads_back = bool(self.is_bidirectional_kv_xfer_enabled)
        if self._reads_back and (reason := self._why_not_read_back(kv_cache_config)):
            self._reads_back = False
            logger.warning("%s: %s", LOG_READBACK_UNSUPPORTED, reason)
        self._announce(vllm_config.kv_transfer_config)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self.leases.pins.wanted(request)
        params = request.kv_transfer_params
        if not params or params.get(DO_REMOTE_PREFILL):
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
        prompt = self._prompts.get(request.request_id)
        if prompt is not None and not prompt.settled and prompt.decision is not None:
            self._settle(prompt, prompt.decision, num_external_tokens)
        elif request.kv_transfer_params and self.is_bidirectional_kv_xfer_enabled:
            # Its blocks will be kept for a readback. Without this the worker does not
            # know the request, and its deadline would never come.
            self._reqs_in_batch.add(request.request_id)
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
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is not None:
            self.leases.prompt_finished(prompt)
            held, answer = super().request_finished(request, block_ids)
            if answer is not None:
                answer[PD_REUSE] = reuse_of(prompt)
                if previous := request.kv_transfer_params.get(REMOTE_REQUEST_ID):
                    answer[PD_PREVIOUS] = previous
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
        answer[PD_TOKENS] = self._proof(request, tokens)
        self.leases.pins.finished(
            request.request_id,
            request.kv_transfer_params,
            answer,
            block_ids,
            tokens,
            self._reqs_need_send[request.request_id],
        )
        return held, answer

    def _decide(self, prompt: Prompt) -> Decision:
        request = prompt.request
        handle = request.kv_transfer_params

        def same_history() -> bool:
            if prompt.same_history is None:
                prompt.same_history = self._same_history(request, handle)
            return prompt.same_history

        return decide(
            handle,
            enabled=self._reads_back,
            threshold=self.kv_recompute_threshold,
            prompt_tokens=request.num_prompt_tokens,
            local_tokens=prompt.local_tokens,
            same_history=same_history,
        )

    def _settle(self, prompt: Prompt, decision: Decision, num_external_tokens: int) -> None:
        prompt.settled = True
        if decision.tokens and not num_external_tokens:
            # The scheduler preferred a longer hit in its own prefix cache.
            decision = Decision(Outcome.BELOW_THRESHOLD, 0)
        prompt.outcome = decision.outcome
        prompt.reading = num_external_tokens
        if not num_external_tokens and decision.releases_handle:
            self.leases.reads.forget_claim(prompt.request.request_id)
        if not decision.tokens and not decision.releases_handle:
            prompt.request.kv_transfer_params[BLOCKS_PROCESSED] = True

    def _account(self, prompt: Prompt) -> None:
        """A read ended. The scheduler has already taken back what failed to load."""
        loaded = prompt.request.num_computed_tokens - prompt.local_tokens
        prompt.tokens_read = max(0, min(prompt.reading, loaded))
        if prompt.tokens_read < prompt.reading:
            prompt.outcome = Outcome.EXPIRED if prompt.expired else Outcome.FAILED
            _correct_counters(prompt)

    def _same_history(self, request: Any, handle: dict[str, Any]) -> bool:
        tokens = tokens_held(handle)
        seed = self._seed(request, tokens)
        if seed is None:
            return False
        # A stock decode leg proves nothing, so nothing is read from it.
        return proof_matches(handle.get(PD_TOKENS), tokens, seed, request.prompt_token_ids)

    def _proof(self, request: Any, tokens: int) -> dict[str, Any]:
        seed = self._seed(request, tokens)
        if seed is None:
            return unprovable(tokens)
        return make_proof(seed, request.all_token_ids[:tokens])

    def _seed(self, request: Any, tokens: int) -> bytes | None:
        """Seed of the first ``tokens`` tokens, None when ids do not tell the inputs."""
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return None
        lora = request.lora_request
        return proof_seed(
            self._model,
            lora.lora_name if lora is not None else None,
            request.cache_salt,
            [
                (item.mm_position.offset, item.mm_position.length, item.identifier)
                for item in request.mm_features
                if item.mm_position.offset < tokens
            ],
        )

    def _why_not_read_back(self, kv_cache_config: Any) -> str | None:
        if self.use_host_buffer:
            return "with a host KV buffer vLLM never issues the read (kv_buffer_device: cpu)"
        return why_reads_are_unsafe(kv_cache_config)

    def _announce(self, config: Any) -> None:
        logger.info(
            "%s: role=%s bidirectional=%s kv_recompute_threshold=%s "
            "decoder_kv_blocks_ttl=%s kv_load_failure_policy=%s readback=%s",
            LOG_CONNECTOR_ACTIVE,
            config.kv_role,
            bool(self.is_bidirectional_kv_xfer_enabled),
            self.kv_recompute_threshold,
            self.decoder_kv_blocks_ttl,
            config.kv_load_failure_policy,
            "on" if self._reads_back else "off",
        )
        if config.kv_load_failure_policy != "recompute":
            logger.warning(
                "pd_connector: kv_load_failure_policy is %s, not recompute: a failed read "
                "fails its request",
                config.kv_load_failure_policy,
            )


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
