"""The growing context of a thread: what is kept of it, what a call adds, what the server answered."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentjax.bench.prompts import Source, WordSize, ids_prompt
from agentjax.bench.reply import Reply
from agentjax.records import RequestRecord
from agentjax.workloads import Call, Prefix


class AbstractConversation(ABC):
    """One thread of a program."""

    @abstractmethod
    def ask(self, call: Call, name: str) -> Mapping[str, Any]:
        """The prompt of the next call: the kept part of the context and new tokens, drawn for `name`."""

    @abstractmethod
    def answer(self, call: Call, record: RequestRecord, reply: Reply) -> None:
        """Adds the output of that call to the context."""


class IdsConversation(AbstractConversation):
    """Context as token ids; the output as the ids that the server sent.

    Attributes:
        made_up: outputs for which it sent none or not all; ids drawn in their place, of the same number.
    """

    def __init__(self, source: Source, prefix: Prefix | None) -> None:
        self.made_up = 0
        self._source = source
        self._name = ""
        self._context = source.ids(f"prefix {prefix.name}", prefix.tokens) if prefix else []

    def ask(self, call: Call, name: str) -> Mapping[str, Any]:
        """See `AbstractConversation`."""
        self._name = name
        self._context = self._context[: call.kept_tokens] + self._source.ids(name, call.new_tokens)
        return ids_prompt(self._context)

    def answer(self, call: Call, record: RequestRecord, reply: Reply) -> None:
        """See `AbstractConversation`."""
        tokens = record.output_tokens or call.output_tokens
        if len(reply.token_ids) >= tokens:
            self._context += reply.token_ids
        else:
            self.made_up += 1
            self._context += self._source.ids(f"{self._name} output", tokens)


@dataclass(frozen=True)
class _Message:
    role: str
    words: list[str]
    tokens: float
    """Estimated, with what the chat template adds."""


class TextConversation(AbstractConversation):
    """Context as text: chat messages, or one text to be completed.

    How many words make the new tokens is corrected after every call by the prompt tokens that the server
    counted, so that a context stays near its planned length; what is kept is cut at a word.
    """

    def __init__(self, source: Source, size: WordSize, prefix: Prefix | None, is_chat: bool) -> None:
        self._source = source
        self._size = size if is_chat else replace(size, overhead_tokens=0.0)
        self._is_chat = is_chat
        self._messages: list[_Message] = []
        self._planned = prefix.tokens if prefix else 0
        """Tokens of the context in the workload."""
        self._actual: float = self._planned
        """Tokens of the context on the server, as far as it told."""
        if prefix:
            count = max(1, round(prefix.tokens / size.tokens_per_word))
            words = source.words(f"prefix {prefix.name}", count)
            self._messages.append(_Message("system", words, prefix.tokens))

    def ask(self, call: Call, name: str) -> Mapping[str, Any]:
        """See `AbstractConversation`."""
        if call.kept_tokens is not None:
            self._keep(call.kept_tokens)
            self._planned = call.kept_tokens
            self._actual = sum(message.tokens for message in self._messages)
        missing = self._planned + call.new_tokens - self._actual
        self._planned += call.new_tokens
        self._add("user", self._source.words(name, self._size.words(missing)), max(1.0, missing))
        return self._prompt()

    def answer(self, call: Call, record: RequestRecord, reply: Reply) -> None:
        """See `AbstractConversation`."""
        output = record.output_tokens or call.output_tokens
        self._planned += call.output_tokens
        prompt = sum(message.tokens for message in self._messages)
        self._actual = (prompt if record.prompt_tokens is None else record.prompt_tokens) + output
        if reply.text:
            self._add("assistant", reply.text.split(" "), output)

    def _add(self, role: str, words: list[str], tokens: float) -> None:
        last = self._messages[-1] if self._messages else None
        if last and last.role == role:  # many chat templates want the roles to alternate
            words, tokens = [*last.words, *words], last.tokens + tokens
            self._messages.pop()
        self._messages.append(_Message(role, words, tokens))

    def _keep(self, tokens: float) -> None:
        kept: list[_Message] = []
        for message in self._messages:
            share = min(1.0, tokens / message.tokens) if message.tokens else 1.0
            count = round(share * len(message.words))
            if count:
                kept.append(_Message(message.role, message.words[:count], share * message.tokens))
            tokens -= message.tokens
            if tokens <= 0:
                break
        self._messages = kept

    def _prompt(self) -> Mapping[str, Any]:
        texts = [(message.role, " ".join(message.words)) for message in self._messages]
        if self._is_chat:
            return {"messages": [{"role": role, "content": text} for role, text in texts]}
        return {"prompt": " ".join(text for _, text in texts)}
