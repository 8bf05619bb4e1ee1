"""A conversation: turn after turn in one sequence, whose keys and values stay."""

from collections.abc import Callable, Sequence
from typing import Any

from dinfer.errors import InputError
from dinfer.exec.answering import answer
from dinfer.exec.execute import Session
from dinfer.exec.prefill import timed_prefill
from dinfer.exec.prompts import Chooser, Pieces, check_sampling, encode_chat, open_tokenizer, stop_ids
from dinfer.timeline import Answer, Run


class Conversation:
    """Turns of one conversation under a session's plan; end it with ``finish``.

    ``messages`` are the turns so far (role and content), ``held`` the token ids whose keys and values are kept.
    """

    def __init__(self, session: Session, *, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0) -> None:
        check_sampling(1, temperature, top_p)
        session.check_predictions()
        self.session, self.tokenizer = session, open_tokenizer(session.checkpoint)
        self.chooser = Chooser(temperature, top_p, seed)
        self.stops = stop_ids(session.checkpoint, self.tokenizer)
        self.messages: list[dict[str, str]] = []
        self.held: list[int] = []
        self.answers: list[Answer] = []
        self.run = session.start()

    def say(self, text: str, max_tokens: int = 64, on_text: Callable[[str], None] | None = None) -> Answer:
        """The answer to ``text`` after all that was said before; ``on_text`` gets its pieces as they come.

        Only what is new is prefilled. Raises InputError when text is empty or the KV cache is too short for it.
        """
        if not text.strip():
            raise InputError("prompt is empty; say something")
        check_sampling(max_tokens, self.chooser.temperature, self.chooser.top_p)
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._encode(messages)
        self.session.check_context(len(ids) + max_tokens)
        kept = self._kept(ids)
        logits = timed_prefill(self.run, 0, ids[kept:], kept, self.session.prefill)
        pieces = Pieces(self.tokenizer)

        def on_token(index: int, token: int) -> None:
            if on_text is not None:
                on_text(pieces.add(token))

        written = answer(self.run, logits[None], [len(ids)], [self.chooser], max_tokens, self.stops, on_token)[0]
        said = Answer(self.tokenizer.decode(written, skip_special_tokens=True), tuple(written))
        self.held = ids + written[:-1]
        self.messages = [*messages, {"role": "assistant", "content": said.text}]
        self.answers.append(said)
        return said

    def finish(self) -> Run:
        """What the whole conversation did; its threads end."""
        self.run.close()
        return self.session.finish(self.run, self.answers)

    def _encode(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if self.tokenizer.chat_template:
            return encode_chat(messages, self.tokenizer)
        new: list[int] = self.tokenizer(messages[-1]["content"], add_special_tokens=not self.held)["input_ids"]
        return self.held + list(self.answers[-1].ids[-1:] if self.answers else ()) + new

    def _kept(self, ids: Sequence[int]) -> int:
        """How many of ``ids`` need no prefill: those held already, short of the last one, whose logits are wanted."""
        same = next((i for i, pair in enumerate(zip(self.held, ids, strict=False)) if pair[0] != pair[1]), None)
        kept = min(len(self.held) if same is None else same, len(ids) - 1)
        rings: Any = [layer[0] for layer in self.run.kv if layer[0].shape[2] < len(self.held)]
        return 0 if rings and kept < len(self.held) else kept  # a ring has forgotten what stood further back
