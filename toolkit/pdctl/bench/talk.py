"""A conversation as it grows: its history and its next prompts."""

from pdctl.bench.client import Prompt, Seen
from pdctl.bench.tokens import Messages, Tokenizer, ids_of_tokens, text_of_tokens, text_to_fill
from pdctl.bench.workload import Part, TurnPlan
from pdctl.errors import PdctlError


class Talk:
    """A conversation's history and its next prompts."""

    def __init__(self, tokenizer: Tokenizer, seed: str, shared_seed: str) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._shared_seed = shared_seed
        self._messages: Messages = []
        self._ids: list[int] = []

    async def next_prompt(self, number: int, plan: TurnPlan, endpoint: str) -> Prompt:
        for place, part in enumerate(plan.parts):
            seed = f"{self._seed}/{number}/{place}"
            if part.shared:
                seed = f"{self._shared_seed}/shared/{place}"
            if endpoint == "completions":
                self._ids += await self._new_ids(part, seed, plan)
            else:
                self._messages.append(
                    {"role": part.role, "content": await self._new_text(part, seed, plan)}
                )
                if part.role == "tool":
                    self._messages[-1]["tool_call_id"] = f"call-{number}"
        if endpoint == "completions":
            return Prompt(ids=list(self._ids))
        return Prompt(messages=list(self._messages))

    async def _new_text(self, part: Part, seed: str, plan: TurnPlan) -> str:
        if part.text is not None:
            return part.text
        if part.tokens is not None:
            return await text_of_tokens(self._tokenizer, part.role, seed, part.tokens)
        assert plan.target_tokens is not None
        return await text_to_fill(
            self._tokenizer, self._messages, part.role, seed, plan.target_tokens
        )

    async def _new_ids(self, part: Part, seed: str, plan: TurnPlan) -> list[int]:
        if part.text is not None:
            return await self._tokenizer.ids(part.text)
        wanted = part.tokens
        if wanted is None:
            assert plan.target_tokens is not None
            wanted = plan.target_tokens - len(self._ids)
        if wanted < 1:
            raise PdctlError(
                f"a prompt of {plan.target_tokens} tokens cannot be made: the history alone has "
                f"{len(self._ids)}"
            )
        return await ids_of_tokens(self._tokenizer, seed, wanted)

    def take_answer(self, seen: Seen) -> None:
        if seen.ids is not None:
            self._ids += seen.ids
        self._messages.append({"role": "assistant", "content": seen.text})
