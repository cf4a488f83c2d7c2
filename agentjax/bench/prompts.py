"""Prompts that no server has seen: random token ids, or random words.

What a prompt says is drawn from the name of its request, the seed and a salt that differs from run to run. So
two prompts differ from their first token on, or from one of the next, unless they share a prefix on purpose.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentjax.bench.words import WORDS


@dataclass(frozen=True)
class Source:
    """Draws of one run.

    Attributes:
        low, high: the range of token ids, `high` left out.
    """

    salt: str
    low: int
    high: int

    def ids(self, name: str, tokens: int) -> list[int]:
        """Token ids drawn for a name."""
        return self._random(name).integers(self.low, self.high, tokens).tolist()

    def words(self, name: str, count: int) -> list[str]:
        """Words drawn for a name; the first is a number, since two draws often begin with the same word."""
        if count < 1:
            return []
        random = self._random(name)
        number = str(random.integers(10**5, 10**6))
        return [number, *(WORDS[index] for index in random.integers(0, len(WORDS), count - 1))]

    def _random(self, name: str) -> np.random.Generator:
        digest = hashlib.sha256(f"{self.salt}\n{name}".encode()).digest()
        return np.random.default_rng(np.frombuffer(digest, dtype=np.uint32))


@dataclass(frozen=True)
class WordSize:
    """Tokens of a text: `overhead_tokens + tokens_per_word * words`.

    The overhead is that of a message in the server's chat template.
    """

    tokens_per_word: float = 1.3
    overhead_tokens: float = 0.0

    @classmethod
    def measured(cls, words: Sequence[int], tokens: Sequence[int]) -> "WordSize":
        """From the tokens of two texts."""
        per_word = (tokens[1] - tokens[0]) / (words[1] - words[0])
        per_word = max(per_word, 0.1)
        return cls(per_word, max(0.0, tokens[0] - per_word * words[0]))

    def words(self, tokens: float) -> int:
        """Words of a message of so many tokens."""
        return max(1, round((tokens - self.overhead_tokens) / self.tokens_per_word))


def ids_prompt(ids: Sequence[int]) -> Mapping[str, Any]:
    """The prompt of a request as token ids."""
    return {"prompt": list(ids)}


def text_prompt(words: Sequence[str], is_chat: bool) -> Mapping[str, Any]:
    """The prompt of a request as one text: a user's message, or what is to be completed."""
    text = " ".join(words)
    return {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
