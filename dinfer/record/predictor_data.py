"""What a training of predictors is told, and the tokens of a trace that it reads, in batches.

A batch mixes pieces of some tokens from everywhere in the trace; what is held does not grow with it.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from dinfer import bits
from dinfer.errors import InputError
from dinfer.predictors import BITS, normalised
from dinfer.record.judge import Split, of_domains
from dinfer.trace import Trace

PIECE = 16
"""Tokens of one sequence that are read together; a batch mixes pieces from everywhere."""

VALIDATION_TOKENS = 4096
"""About so many tokens at most stop the training, and set thresholds."""


@dataclass(frozen=True)
class Settings:
    """How predictors are trained.

    ``lookahead`` in layers; ``share`` of the FFN's bytes that they may take; ``bound``: largest missed contribution of
    a layer at its operating threshold, on prompts of the domains ``choose``, which are not learnt, or without any on
    validation prompts, whose domains are; ``hold_out``: domains kept for the test. ``batch`` in tokens; a layer stops
    after ``patience`` epochs without a better validation loss. ``contribution`` (0 to 1) is how far an active neuron's
    weight in the loss follows its contribution; ``bits`` of a stored weight, 8 or 16.
    """

    lookahead: int = 1
    share: float = 0.08
    bound: float = 0.05
    hold_out: tuple[str, ...] = ()
    choose: tuple[str, ...] = ()
    epochs: int = 6
    batch: int = 256
    rate: float = 2e-3
    patience: int = 2
    contribution: float = 1.0
    seed: int = 0
    bits: int = 8

    def check(self) -> None:
        """Raise InputError for a value that breaks a rule."""
        for name in ("epochs", "batch", "patience"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("bound", "contribution"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name):g}; it must lie between 0 and 1")
        if both := sorted({*self.hold_out} & {*self.choose}):
            raise InputError(
                f"domain {both[0]!r} is held out for the test and to choose thresholds by; name it for one of the two"
            )
        if self.bits not in BITS:
            raise InputError(f"bits is {self.bits}; it must be {BITS[0]} or {BITS[1]}")
        if not self.rate > 0:
            raise InputError(f"rate is {self.rate:g}; it must be above 0")

    def document(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


class Data:
    """The trace's tokens in batches: residuals and labels of each layer."""

    def __init__(self, trace: Trace, parts: Split, settings: Settings) -> None:
        self.trace, self.settings, self.spec = trace, settings, trace.spec
        self.parts = parts
        self.pieces = _pieces(trace, parts.train)
        self.validation = spread(parts.validation, VALIDATION_TOKENS)
        chosen = spread(of_domains(trace, settings.choose), VALIDATION_TOKENS) if settings.choose else self.validation
        self.chosen_on = chosen  # rows that set the thresholds
        self.steps = -(-len(parts.train) // settings.batch)
        self.weights = np.ones((self.spec.layers, 256), np.float32)  # of an active neuron in the loss, by its code
        self.frequency = np.zeros((self.spec.layers, self.spec.neurons))

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Let ``each_layer`` work meanwhile: a core takes a layer at a time, which no layer's figures depend on."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)) as self.pool:
                yield
        finally:
            torch.set_num_threads(before)

    def each_layer(self, work: Callable[[int], Any], layers: Iterable[int] | None = None) -> list[Any]:
        """What ``work`` gives for each of ``layers`` (default: all)."""
        return list(self.pool.map(work, range(self.spec.layers) if layers is None else layers))

    def batches(self, epoch: int) -> Iterator[np.ndarray]:
        """Rows of each batch of an epoch; the order depends on the seed and the epoch alone."""
        order = np.random.default_rng([self.settings.seed, epoch]).permutation(len(self.pieces))
        rows = np.concatenate([self.pieces[i] for i in order])
        for part in np.array_split(rows, self.steps):
            yield np.sort(part)

    def read(self, rows: np.ndarray) -> "Batch":
        """The arrays of ``rows``."""
        assert self.trace.hidden is not None
        assert self.trace.contribution is not None
        return Batch(self, self.trace.hidden[rows], self.trace.active[rows], self.trace.contribution[rows])


class Batch(NamedTuple):
    """Residuals, active words and contribution codes [token, layer, ...] of some tokens."""

    data: Data
    hidden: np.ndarray
    words: np.ndarray
    codes: np.ndarray

    def inputs(self, layer: int) -> torch.Tensor:
        """What predicts ``layer``: float32 [tokens, hidden]."""
        return torch.from_numpy(normalised(self.hidden[:, max(0, layer - self.data.settings.lookahead)]))

    def active(self, layer: int) -> torch.Tensor:
        """Labels of ``layer``: float32 [tokens, neurons]."""
        return torch.from_numpy(bits.unpack(self.words[:, layer], self.data.spec.neurons)).float()

    def weights(self, layer: int, active: torch.Tensor) -> torch.Tensor:
        """Weights in the loss of ``layer``: float32 [tokens, neurons]."""
        codes = self.codes[:, layer] * active.numpy().astype(np.uint8)  # code 0 stands for the inactive
        return torch.from_numpy(self.data.weights[layer][codes])


def spread(rows: np.ndarray, most: int) -> np.ndarray:
    """At most ``most`` of ``rows``, evenly."""
    return rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(np.int64)]


def _pieces(trace: Trace, rows: np.ndarray) -> list[np.ndarray]:
    """``rows`` cut where the sequence changes and after at most PIECE tokens."""
    sequence = trace.tokens["sequence"].to_numpy()[rows]
    runs = np.split(rows, np.flatnonzero(np.diff(sequence)) + 1)
    return [run[start : start + PIECE] for run in runs for start in range(0, len(run), PIECE)]
