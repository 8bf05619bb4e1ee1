"""How well a plan's model still writes: perplexity, next-token agreement and divergence of teacher-forced text.

What is measured is what the executor computes: its own attention, its own FFN over its own weights. The reference
is the dense model in the same precision.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from dinfer.errors import InputError
from dinfer.exec import kernels_gpu
from dinfer.exec.decode import Running, decode_token, end_token
from dinfer.exec.execute import Session
from dinfer.exec.kernels_cpu import ffn_cpu
from dinfer.plan import Plan

WAYS = ("dense", "sparse", "dynamic", "predicted")
"""All neurons; those above the plan's one threshold a layer; those above the balanced thresholds of each side; the
predicted ones. Of a plan the last that it has is how it decodes."""

RESAMPLES = 2000
"""Bootstrap samples of blocks behind an interval."""

Z95 = 1.959963984540054
"""Half width of the normal distribution's central 95%, in standard deviations."""


@dataclass(frozen=True, eq=False)
class Quality:
    """One way's figures, token by token: [block, token] each, the first token of a block not scored.

    ``loss`` and ``dense_loss`` float64: negative log likelihood of the text's token in nats; ``agrees`` bool: the
    likeliest token is the dense model's; ``divergence`` float64: KL(dense || way) in nats; ``computed_share``: of
    all neurons, how many were above the thresholds, or predicted.
    """

    way: str
    loss: np.ndarray
    dense_loss: np.ndarray
    agrees: np.ndarray
    divergence: np.ndarray
    computed_share: float

    def row(self, seed: int = 0) -> dict[str, Any]:
        """Plain values: each figure with its 95% interval, ``_low`` to ``_high``.

        Perplexity, its ratio to the dense one and the divergence: percentile bootstrap over blocks, the ratio from
        paired differences of the same blocks. Agreement: Wilson's interval, which takes tokens as independent.
        """
        drawn = resampled(len(self.loss), seed)
        perplexity = np.exp(with_interval(self.loss, drawn))
        ratio = np.exp(with_interval(self.loss - self.dense_loss, drawn))
        kl = with_interval(self.divergence, drawn)
        agreement = wilson(int(self.agrees.sum()), self.agrees.size)
        figures = {"perplexity": perplexity, "ratio": ratio, "agreement": agreement, "divergence": kl}
        row: dict[str, Any] = {"way": self.way, "computed_share": self.computed_share, "tokens": self.loss.size}
        for name, (value, low, high) in figures.items():
            row |= {name: float(value), f"{name}_low": float(low), f"{name}_high": float(high)}
        return row


def resampled(blocks: int, seed: int = 0) -> np.ndarray:
    """int64 [RESAMPLES, blocks]: which blocks each bootstrap sample draws."""
    return np.random.default_rng(seed).integers(0, blocks, (RESAMPLES, blocks))


def with_interval(values: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Mean of ``values`` [block, token], its 2.5th and 97.5th percentile over the blocks ``drawn`` [sample, block]."""
    means = values.mean(axis=1)
    return np.array([means.mean(), *np.percentile(means[drawn].mean(axis=1), [2.5, 97.5])])


def wilson(successes: int, trials: int) -> tuple[float, float, float]:
    """Share and its 95% interval by Wilson (1927): share, low, high."""
    share, z2 = successes / trials, Z95**2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    return share, centre - half, centre + half


class Scorer:
    """Logits of whole texts as ``session`` computes them in one of WAYS; ``close`` ends its threads.

    ReLU kinds compute the sparse way with the CPU's kernel, which reads gates first and the rest of the active neurons
    only; it and the dense way are one function, computed differently. ``computed`` counts [way] the neurons computed
    so far, ``positions`` [way] the token-layers.
    """

    def __init__(self, session: Session) -> None:
        self.run: Running = session.start()
        self.computed = dict.fromkeys(WAYS, 0)
        self.positions = dict.fromkeys(WAYS, 0)

    def logits(self, ids: Sequence[int] | np.ndarray, way: str, prompt: int = 1) -> torch.Tensor:
        """float32 [token, vocab] after each of ``ids``, from an empty context; at most the plan's context.

        Nothing is predicted of the first ``prompt`` tokens, as in a run, whose prompt is not: predictors have not
        learnt a text's first token, whose residual is some hundred times the others'.
        """
        if way == "dynamic" and self.run.policy.moves:
            return self._decoded(ids)
        run = self.run
        residuals: list[torch.Tensor] = []
        chunk = torch.as_tensor(ids, device=run.device)
        hidden = run.family.embed(run.dense, chunk, [0])
        for layer in range(run.plan.spec.layers):
            hidden = run.family.attention(run.dense, layer, hidden, [run.kv[layer][0]], [0])
            x = run.family.ffn_input(run.dense, layer, hidden).to(run.bank.host.device)
            residuals.append(hidden)
            hidden = hidden + self._ffn(layer, x, way, residuals, prompt).to(hidden.device)
            if run.bank.down_bias is not None:
                hidden = hidden + run.bank.down_bias[layer]
        return run.family.head(run.dense, hidden).float()

    def close(self) -> None:
        """End the threads."""
        self.run.close()

    def _ffn(
        self, layer: int, x: torch.Tensor, way: str, residuals: list[torch.Tensor], prompt: int
    ) -> torch.Tensor:
        """Partial sums [token, hidden] of one layer; ``residuals`` [token, hidden] are those of the layers so far."""
        run = self.run
        self.positions[way] += len(x) if way != "predicted" else max(0, len(x) - prompt)
        if way == "sparse" and run.plan.spec.sparsity_kind == "relu":
            return self._gates_first(layer, x)
        bias = None if run.bank.up_bias is None else run.bank.up_bias[layer].to(x.dtype)
        gate = None
        if way == "dynamic":
            gate = gate_thresholds_of(run, layer)
        elif way == "predicted":
            chosen = predicted_for(run, layer, residuals).to(x.device)
            self.computed[way] += int(chosen[prompt:].count_nonzero())
            chosen[:prompt] = True
            gate = torch.where(chosen, -1.0, torch.inf)
        total, values = kernels_gpu.ffn(
            run.bank.host[layer], x, run.plan.spec, bias, thresholds_of(run, layer, way), gate_threshold=gate
        )
        if way != "predicted":
            self.computed[way] += values.numel() if way == "dense" else int(values.count_nonzero())
        return total

    def _gates_first(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """All neurons token by token as the CPU's part of a run computes them."""
        run, rows = self.run, x.float().numpy()
        ids, total = np.arange(run.bank.neurons, dtype=np.int32), np.zeros(rows.shape, np.float32)
        values, bias = np.empty(len(ids), np.float32), None if run.workers.biases is None else run.workers.biases[layer]
        threshold = float(thresholds_of(run, layer, "sparse"))
        for row, out in zip(rows, total, strict=True):
            self.computed["sparse"] += ffn_cpu(
                run.plan.spec, run.workers.rows[layer], row, ids, out, values, threshold, bias
            )
        return torch.from_numpy(total).to(x.dtype)

    def _decoded(self, ids: Sequence[int] | np.ndarray) -> torch.Tensor:
        """Token by token, as a live run does: predictions and residency move on."""
        run, rows = self.run, []
        run.predictions[:] = 0
        for position, token in enumerate(ids):
            rows.append(decode_token(run, [int(token)], [position])[0].float().cpu())
            end_token(run)
        self.computed["dynamic"] += sum(int(work[:, :2].sum()) for work in run.work)
        self.positions["dynamic"] += len(run.work) * run.plan.spec.layers
        run.work.clear()
        run.moves.clear()
        run.clock.spans.clear()
        return torch.stack(rows)


def thresholds_of(run: Running, layer: int, way: str) -> float | torch.Tensor:
    """What a neuron's value must exceed: one number for all, or of each side float32 [neuron]."""
    if way == "dense":
        return 0.0
    if way != "dynamic" or run.plan.levels is None:
        return float(run.value_thresholds[layer])
    return torch.where(_resident(run, layer), float(run.gpu_thresholds[layer]), float(run.workers.thresholds[layer]))


def gate_thresholds_of(run: Running, layer: int) -> torch.Tensor:
    """What the magnitude of act(gate) must exceed on the CPU: float32 [neuron], -1 for residents."""
    return torch.where(_resident(run, layer), -1.0, float(run.workers.gate_thresholds[layer]) or -1.0)


def predicted_for(run: Running, layer: int, residuals: Sequence[torch.Tensor]) -> torch.Tensor:
    """Who is computed of ``layer``, bool [token, neuron], by the residuals [token, hidden] of the layers up to it."""
    if run.held[layer]:
        return torch.ones(len(residuals[0]), run.bank.neurons, dtype=torch.bool)
    assert run.predictor is not None
    return run.predictor.chosen(layer, residuals[max(0, layer - run.plan.lookahead)])


def _resident(run: Running, layer: int) -> torch.Tensor:
    return torch.from_numpy(run.bank.slot_of[layer] >= 0)


@torch.inference_mode()
def quality(
    session: Session,
    blocks: np.ndarray,
    ways: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Quality]:
    """Score the texts ``blocks`` int [block, token], each from an empty context, in each of ``ways``, by default
    all that the plan has.

    ``progress`` is called with (blocks done, blocks). Raises InputError for fewer than 2 blocks, blocks of fewer
    than 2 tokens, or blocks longer than the plan's context, and for ways that the plan has not.
    """
    ways = ways_of(session.plan) if ways is None else ways
    check_ways(session, ways)
    count, length = blocks.shape
    if count < 2 or length < 2:
        raise InputError(f"text gives {count} blocks of {length} tokens; at least 2 of 2 are needed for an interval")
    if length > session.plan.context:
        raise InputError(
            f"blocks have {length} tokens, the plan's KV cache holds {session.plan.context}; lower --block or plan "
            f"with --context {length}"
        )
    figures: dict[str, list[tuple[np.ndarray, ...]]] = {way: [] for way in ways}
    scorer = Scorer(session)
    try:
        for number, block in enumerate(blocks):
            dense = _log_likelihoods(scorer, block, "dense")
            for way in ways:
                given = dense if way == "dense" else _log_likelihoods(scorer, block, way)
                figures[way].append(_compared(block, given, dense))
            if progress:
                progress(number + 1, count)
    finally:
        scorer.close()
    return [_gathered(way, figures[way], _share(scorer, way)) for way in ways]


def _gathered(way: str, blocks: list[tuple[np.ndarray, ...]], computed_share: float) -> Quality:
    loss, dense_loss, agrees, divergence = (np.stack(part) for part in zip(*blocks, strict=True))
    return Quality(way, loss, dense_loss, agrees, divergence, computed_share)


def _log_likelihoods(scorer: Scorer, block: np.ndarray, way: str) -> torch.Tensor:
    return torch.log_softmax(scorer.logits(block, way)[:-1].cpu(), dim=-1)


def _compared(block: np.ndarray, given: torch.Tensor, reference: torch.Tensor) -> tuple[np.ndarray, ...]:
    """loss, dense loss, agrees and divergence of one block, [token] each, from log likelihoods [token, vocab]."""
    following = torch.from_numpy(np.asarray(block[1:], np.int64))[:, None]
    loss, dense_loss = (-rows.gather(1, following)[:, 0].double().numpy() for rows in (given, reference))
    agrees = (given.argmax(dim=1) == reference.argmax(dim=1)).numpy()
    divergence = (reference.exp() * (reference - given)).sum(dim=1).double().numpy()
    return loss, dense_loss, agrees, divergence


def _share(scorer: Scorer, way: str) -> float:
    return scorer.computed[way] / max(scorer.positions[way], 1) / scorer.run.plan.spec.neurons


def quality_table(found: Sequence[Quality]) -> pd.DataFrame:
    """One row a way: ``Quality.row``."""
    return pd.DataFrame([one.row() for one in found])


def ways_of(plan: Plan) -> tuple[str, ...]:
    """The ways in which ``plan`` can compute: dense and sparse always, the last is how it decodes."""
    dynamic, predicted = plan.levels is not None, plan.activation == "predicted"
    return ("dense", "sparse", *("dynamic",) * dynamic, *("predicted",) * predicted)


def check_ways(session: Session, ways: Sequence[str]) -> None:
    """Raise InputError for a way that the session's plan does not have, or that predicts without a predictor."""
    plan = session.plan
    for way in ways:
        if way not in ways_of(plan):
            raise InputError(f"way {way!r} is not one of {', '.join(ways_of(plan))}, those of this plan")
    if "predicted" in ways and session.predictor is None:
        raise InputError(
            f"plan predicts by {plan.prediction!r}, which says nothing of a text; plan with a trained --predictor DIR, "
            "or with --activation exact"
        )


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file; raises InputError for a missing or empty file, or one of other bytes."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"text {path} is no file; give --text a file of UTF-8 text")
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"text {path} is no UTF-8 text (byte {error.start}); convert it first") from None
    if not text.strip():
        raise InputError(f"text {path} is empty; give --text a file of UTF-8 text")
    return text


def text_blocks(directory: str | Path, text: str, block: int, tokens: int) -> np.ndarray:
    """The first ``tokens`` tokens of ``text`` by the tokenizer in ``directory``: int64 [block, token].

    What is left over is dropped, and no special token is added. Raises InputError where that gives fewer than two
    blocks.
    """
    from transformers import AutoTokenizer

    if block < 2 or tokens < 2 * block:
        raise InputError(
            f"tokens is {tokens} and block {block}; there must be 2 blocks of at least 2 tokens for an interval"
        )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:tokens]
    count = len(ids) // block
    if count < 2:
        raise InputError(f"text has {len(ids)} tokens, two blocks need {2 * block}; lower --block or give more text")
    return np.array(ids[: count * block], np.int64).reshape(count, block)
