"""Text in and out: prompts to token ids, the chat template, sampling, stop tokens, and pieces of text as they come."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dinfer.errors import InputError
from dinfer.families import Checkpoint

Prompt = str | Sequence[int]
"""Text, or token ids."""


def listed(prompt: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts in ``prompt``, which is one or a sequence of them; raises InputError for an empty one."""
    one = isinstance(prompt, str) or all(isinstance(part, int | np.integer) for part in prompt)
    prompts: list[Any] = [prompt] if one else list(prompt)
    if any(isinstance(text, str) and not text.strip() for text in prompts):
        raise InputError("prompt is empty; give --prompt some text")
    return prompts


def open_tokenizer(checkpoint: Checkpoint) -> Any:
    """The tokenizer beside the checkpoint."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint.directory)


def encode(prompt: Prompt, tokenizer: Any, chat: bool) -> list[int]:
    """Token ids of ``prompt``; text is put into the chat template where the tokenizer has one and ``chat`` is true."""
    if not isinstance(prompt, str):
        ids = [int(token) for token in prompt]
    elif chat and tokenizer.chat_template:
        ids = encode_chat([{"role": "user", "content": prompt}], tokenizer)
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise InputError("prompt has no token; give --prompt some text")
    return ids


def encode_chat(messages: Sequence[Mapping[str, str]], tokenizer: Any) -> list[int]:
    """Token ids of a conversation in the tokenizer's chat template, up to where the answer begins."""
    text = str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def stop_ids(checkpoint: Checkpoint, tokenizer: Any) -> set[int]:
    """The tokens at which the model ends its answer, by its config and its tokenizer."""
    stop = checkpoint.config.get("eos_token_id")
    stops = set(stop) if isinstance(stop, list) else {stop}
    if tokenizer is not None:
        stops.add(tokenizer.eos_token_id)
    return {stop for stop in stops if stop is not None}


def check_sampling(max_tokens: int, temperature: float, top_p: float) -> None:
    """Raise InputError for numbers that nothing can be sampled by."""
    if max_tokens < 1:
        raise InputError(f"tokens is {max_tokens}; it must be at least 1")
    if not temperature >= 0:
        raise InputError(f"temperature is {temperature:g}; it must be at least 0 (0 is greedy)")
    if not 0 < top_p <= 1:
        raise InputError(f"top_p is {top_p:g}; it must lie above 0 and be at most 1")


def sample(logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> int:
    """The next token id from ``logits`` [vocab]: the largest at temperature 0, else drawn from the top ``top_p``."""
    if temperature <= 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.float().cpu() / temperature, dim=-1)
    ordered, order = probabilities.sort(descending=True)
    ordered[ordered.cumsum(0) - ordered > top_p] = 0
    return int(order[torch.multinomial(ordered, 1, generator=generator)])


class Chooser:
    """Chooses one sequence's tokens with a random stream of its own, so that no other sequence changes them."""

    def __init__(self, temperature: float, top_p: float, seed: int) -> None:
        self.temperature, self.top_p = temperature, top_p
        self.generator = torch.Generator().manual_seed(seed)

    def token(self, logits: torch.Tensor) -> int:
        """The next token id from ``logits`` [vocab]."""
        return sample(logits, self.temperature, self.top_p, self.generator)


class Pieces:
    """Text of tokens as they come: each call gives what the new token adds.

    A character of several tokens comes with its last one. Only the last tokens are decoded again, as a tokenizer may
    join a token to the one before.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.before: list[int] = []
        self.waiting: list[int] = []

    def add(self, token: int) -> str:
        """The text that ``token`` adds; empty while a character is not complete."""
        self.waiting.append(token)
        shown = self._text(self.before)
        text = self._text(self.before + self.waiting)
        if text.endswith("\ufffd"):
            return ""
        self.before, self.waiting = self.waiting, []
        return text[len(shown) :]

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)
