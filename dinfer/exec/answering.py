"""Decoding until every sequence has ended: sample, decode the next token, drop who has stopped."""

from collections.abc import Callable, Sequence

import torch

from dinfer.exec.decode import Running, decode_token, end_token
from dinfer.exec.prompts import Chooser


def answer(
    run: Running,
    logits: torch.Tensor,
    starts: Sequence[int],
    choosers: Sequence[Chooser],
    max_tokens: int,
    stops: set[int],
    on_token: Callable[[int, int], None] | None = None,
    on_logits: Callable[[torch.Tensor], None] | None = None,
) -> list[list[int]]:
    """Token ids written in each sequence, at most ``max_tokens``, the last one of ``stops`` where it stopped.

    ``logits`` [sequence, vocab] are those after the prompts, ``starts`` the position after each. ``on_token`` gets
    sequence and token id, ``on_logits`` the logits of the sequences that still go. The clock runs meanwhile.
    """
    written: list[list[int]] = [[] for _ in starts]
    run.going = range(len(starts))
    run.clock.resume()
    while True:
        if on_logits is not None:
            on_logits(logits)
        for index, row in zip(run.going, logits, strict=True):
            token = choosers[index].token(row)
            written[index].append(token)
            if on_token is not None:
                on_token(index, token)
        if len(written[run.going[0]]) > 1:  # the first token is the prompt's, not decoded
            end_token(run)
        run.going = [s for s in run.going if len(written[s]) < max_tokens and written[s][-1] not in stops]
        if not run.going:
            break
        ids = [written[index][-1] for index in run.going]
        logits = decode_token(run, ids, [starts[index] + len(written[index]) - 1 for index in run.going])
    run.clock.pause()
    return written
