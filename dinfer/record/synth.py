"""Statistics -> Trace: activity drawn from a log-odds mixture, for models not at hand. No torch.

The log-odds that a neuron is active at a token of a sequence are a sum: the layer's offset, the neuron's
popularity, the sequence's effect on the neuron, and the token's effect on all neurons. From token to token a
neuron keeps its state with probability ``persistence`` and is drawn anew otherwise, so that its share of
active tokens stays p while states one token apart correlate by ``persistence``. The model does not know: a
layer that wakes up within a sequence, neurons that are active together, and strength that lasts from one
token to the next.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numba import njit
from scipy.special import expit, ndtri

from dinfer.errors import InputError
from dinfer.model import ModelSpec
from dinfer.trace import Trace, TraceWriter

BITS = 24
"""Binary digits of a probability: 0.03% is told from 0.03% + 6e-8."""

TOKENS_A_SEQUENCE = 128
"""Decode tokens of a sequence where nothing else is said; hot sets depend on it."""

TOKEN_LEVELS = 8
"""The token's effect takes so many equally likely values."""

SCORE_SLOPE, SCORE_SD, UP_SD = 0.2, 0.8, 1.0
"""Log of a score: slope times log-odds, as a unit normal's excess over its threshold grows, plus a spread.

A contribution is the score times an independent factor with ``UP_SD``. Ours: no published figure.
"""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ZERO, _ONE, _ALL = np.uint64(0), np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)
_POPULARITY, _PROFILE, _SEQUENCE, _TOKEN, _ACTIVE, _LEVELS = range(6)  # what a random number is for
_QUADRATURE = np.polynomial.hermite_e.hermegauss(48)


@dataclass(frozen=True)
class Statistics:
    """The knobs of the mixture; each acts alone.

    ``density``: mean share of active neurons over layers. ``depth``: log-odds of the first layer's density
    minus the last's, linear between. ``popularity_sd``, ``sequence_sd``, ``token_sd``: standard deviations in
    log-odds over neurons, over sequences for one neuron, and over tokens for all neurons together.
    ``persistence``: probability that a neuron keeps its state, the correlation of adjacent tokens.
    ``mismatch``: sine of the angle between the offline profile's popularity and the true one, 0 the same and
    1 unrelated. ``preset`` and ``domain`` say where the values come from. Raises InputError for values out of
    range.
    """

    density: float
    popularity_sd: float
    sequence_sd: float
    persistence: float
    depth: float = 0.0
    token_sd: float = 0.0
    mismatch: float = 0.0
    preset: str = ""
    domain: str = "mixed"

    def __post_init__(self) -> None:
        if not 0 < self.density < 1:
            raise InputError(f"density is {self.density}; it must be between 0 and 1")
        for name in ("popularity_sd", "sequence_sd", "token_sd"):
            if not 0 <= getattr(self, name) <= 20:
                raise InputError(f"{name} is {getattr(self, name)}; it must be between 0 and 20")
        if not -20 <= self.depth <= 20:
            raise InputError(f"depth is {self.depth}; it must be between -20 and 20")
        if not 0 <= self.persistence < 1:
            raise InputError(f"persistence is {self.persistence}; it must be at least 0 and below 1")
        if not 0 <= self.mismatch <= 1:
            raise InputError(f"mismatch is {self.mismatch}; it must be between 0 and 1")

    @property
    def passing_sd(self) -> float:
        """Standard deviation of all that a corpus averages out, in log-odds: sequence and token effect."""
        return float(np.hypot(self.sequence_sd, self.token_sd))

    def layer_density(self, layers: int) -> np.ndarray:
        """Density of each layer: float64 [layer], whose mean is ``density``."""
        slope = self.depth * np.linspace(0.5, -0.5, layers) if layers > 1 else np.zeros(1)
        return expit(_solve(lambda middle: expit(middle + slope).mean(), np.array(self.density)) + slope)

    def offsets(self, layers: int) -> np.ndarray:
        """Log-odds of each layer that give it its density when the effects are added: float64 [layer]."""
        spread = float(np.hypot(self.popularity_sd, self.passing_sd))
        return _solve(lambda offset: blurred(offset, spread), self.layer_density(layers))


def blurred(log_odds: np.ndarray, sd: float) -> np.ndarray:
    """Mean probability of ``log_odds`` with a normal effect of ``sd`` added: float64, same shape."""
    nodes, weights = _QUADRATURE
    if sd == 0:
        return expit(log_odds)
    total = np.zeros(np.shape(log_odds))
    for node, weight in zip(nodes, weights / weights.sum(), strict=True):
        total += weight * expit(log_odds + sd * node)
    return total


def token_shifts(sd: float) -> np.ndarray:
    """Equally likely values of the token's effect, in log-odds: float64 [1 or TOKEN_LEVELS]."""
    if sd == 0:
        return np.zeros(1)
    values = ndtri((np.arange(TOKEN_LEVELS) + 0.5) / TOKEN_LEVELS)
    return sd * values / values.std()


def synth(
    spec: ModelSpec,
    statistics: Statistics,
    tokens: int,
    sequences: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    *,
    prompt: int = 64,
    prefill: bool = False,
    levels: bool = False,
    chunk: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """A synthetic trace of ``tokens`` decode tokens in ``sequences`` (default: one for 128 tokens) of equal
    length.

    Decoding starts at position ``prompt``; ``prefill`` adds the prompt's rows. ``levels`` adds scores and
    contributions. With ``out`` the trace is written there, ``chunk`` tokens at a time, else it is held in
    memory. Every random number depends on seed, sequence, position, layer and neuron alone: neither ``chunk``
    nor how many sequences there are changes a token. Token ids are 0. ``progress`` is told rows done and rows
    in all. Raises InputError for counts that do not fit together, or an ``out`` that is not free.
    """
    count = -(-tokens // TOKENS_A_SEQUENCE) if sequences is None else sequences
    _check_counts(tokens, count, seed, prompt, chunk)
    table = _token_table(tokens, count, prompt, prefill)
    scale = float(np.exp(5 * SCORE_SLOPE + 3 * SCORE_SD))
    meta: dict[str, Any] = {
        "kind": "synthetic",
        "model": spec.name,
        "preset": statistics.preset,
        "statistics": asdict(statistics),
        "seed": seed,
        "sequences": count,
        "prompt": prompt,
    }
    if levels:
        meta["score_scale"] = [scale] * spec.layers
        meta["contribution_scale"] = [scale * float(np.exp(2 * UP_SD))] * spec.layers
    optional = ("score", "contribution") * levels
    chunks = _chunks(spec, statistics, table, seed, levels, chunk)
    if out is not None:
        with TraceWriter(out, spec, meta, arrays=optional) as writer:
            for rows, arrays in chunks:
                writer.append(table.iloc[rows], **arrays)
                _tell(progress, rows.stop, len(table))
        return Trace.load(out)
    whole = {"active": np.empty((len(table), spec.layers, spec.words), np.uint64)}
    whole |= {name: np.empty((len(table), spec.layers, spec.neurons), np.uint8) for name in optional}
    for rows, arrays in chunks:
        for name, array in arrays.items():
            whole[name][rows] = array
        _tell(progress, rows.stop, len(table))
    return Trace(spec=spec, tokens=table, meta=meta, **whole)


def profile(spec: ModelSpec, statistics: Statistics, seed: int = 0) -> np.ndarray:
    """What an offline profile says: share of tokens in which each neuron is active, float32 [layer, neuron].

    It is of a large corpus whose popularity is that of ``synth`` with the same seed, turned by ``mismatch``;
    with mismatch 0 a long trace's own frequency comes to it.
    """
    other = _ranked_normals(seed, _PROFILE, spec.layers, spec.neurons)
    true = _ranked_normals(seed, _POPULARITY, spec.layers, spec.neurons)
    turned = np.sqrt(1 - statistics.mismatch**2) * true + statistics.mismatch * other
    log_odds = statistics.offsets(spec.layers)[:, None] + statistics.popularity_sd * turned
    return blurred(log_odds, statistics.passing_sd).astype(np.float32)


def statistics_of(trace: Trace) -> Statistics:
    """The knobs that a synthetic trace was drawn with; raises InputError for a recorded one."""
    if not trace.synthetic or "statistics" not in trace.meta:
        raise InputError(f"trace of {trace.spec.name} is not drawn from statistics; it has no knobs")
    return Statistics(**trace.meta["statistics"])


def _solve(increasing: Callable[[np.ndarray], np.ndarray], wanted: np.ndarray) -> np.ndarray:
    """Where a function of log-odds reaches ``wanted``, by bisection; shape of ``wanted``."""
    low, high = np.full(wanted.shape, -200.0), np.full(wanted.shape, 200.0)
    for _ in range(64):
        middle = (low + high) / 2
        below = increasing(middle) < wanted
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return (low + high) / 2


def _check_counts(tokens: int, sequences: int, seed: int, prompt: int, chunk: int) -> None:
    if tokens < 1:
        raise InputError(f"tokens is {tokens}; it must be at least 1")
    if not 1 <= sequences <= tokens:
        raise InputError(f"sequences is {sequences}; it must be between 1 and the {tokens} tokens")
    if not 0 <= seed < 2**63:
        raise InputError(f"seed is {seed}; it must be at least 0 and below 2**63")
    if prompt < 0:
        raise InputError(f"prompt is {prompt}; it must be at least 0 tokens")
    if chunk < 1:
        raise InputError(f"chunk is {chunk}; it must be at least 1 token")


def _token_table(tokens: int, sequences: int, prompt: int, prefill: bool) -> pd.DataFrame:
    lengths = [tokens // sequences + (number < tokens % sequences) for number in range(sequences)]
    first = 0 if prefill else prompt
    position = np.concatenate([np.arange(first, prompt + length) for length in lengths])
    repeats = [prompt - first + length for length in lengths]
    return pd.DataFrame(
        {
            "id": np.zeros(len(position), np.int32),
            "sequence": np.repeat(np.arange(sequences, dtype=np.int32), repeats),
            "position": position.astype(np.int32),
            "phase": np.where(position < prompt, "prefill", "decode"),
        }
    )


def _tell(progress: Callable[[int, int], None] | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)


def _chunks(
    spec: ModelSpec, statistics: Statistics, table: pd.DataFrame, seed: int, levels: bool, chunk: int
) -> Iterator[tuple[slice, dict[str, np.ndarray]]]:
    """Rows of ``table`` and their arrays, in order; a sequence's probabilities are held, not its activity."""
    popularity = statistics.popularity_sd * _ranked_normals(seed, _POPULARITY, spec.layers, spec.neurons)
    popularity += statistics.offsets(spec.layers)[:, None]
    shifts = token_shifts(statistics.token_sd)
    planes = np.empty((len(shifts), spec.layers, spec.words, BITS), np.uint64)
    keep = np.uint64(round(statistics.persistence * 2**BITS))
    ends = np.flatnonzero(np.diff(table["sequence"], append=-1)) + 1
    start = 0
    for sequence, end in enumerate(ends.tolist()):
        effect = _normals(_key(seed, _SEQUENCE, sequence), spec.layers * spec.neurons)
        log_odds = popularity + statistics.sequence_sd * effect.reshape(popularity.shape)
        _fill_planes(log_odds, shifts, planes)
        state = np.zeros((spec.layers, spec.words), np.uint64)
        fresh = True
        for first in range(start, end, chunk):
            rows = slice(first, min(first + chunk, end))
            position = table["position"].to_numpy()[rows]
            active = np.empty((len(position), spec.layers, spec.words), np.uint64)
            keys = _key(seed, _TOKEN, sequence), _key(seed, _ACTIVE, sequence)
            _walk(planes, keep, keys[0], keys[1], position, fresh, state, active)
            arrays = {"active": active}
            if levels:
                shape = (len(position), spec.layers, spec.neurons)
                arrays |= {"score": np.zeros(shape, np.uint8), "contribution": np.zeros(shape, np.uint8)}
                key = _key(seed, _LEVELS, sequence)
                _fill_levels(log_odds, key, position, active, arrays["score"], arrays["contribution"])
            fresh = False
            yield rows, arrays
        start = end


def _key(*parts: int) -> np.uint64:
    """One 64-bit key of whole numbers; another one for each tuple."""
    key = 0
    for part in parts:
        key = int(_mix(np.uint64((key + (part + 1) * int(_GOLDEN)) % 2**64)))
    return np.uint64(key)


def _normals(key: np.uint64, count: int) -> np.ndarray:
    """Normal deviates [count]."""
    uniform = np.empty(count)
    _fill_uniform(key, uniform)
    return ndtri(uniform)


def _ranked_normals(seed: int, purpose: int, layers: int, neurons: int) -> np.ndarray:
    """The normal quantiles of ``neurons`` equal shares in random order: the same values in each layer [layer,
    neuron].

    So a layer's density and skew do not depend on the seed, only on who is popular.
    """
    uniform = np.empty((layers, neurons))
    for layer in range(layers):
        _fill_uniform(_key(seed, purpose, layer), uniform[layer])
    rank = uniform.argsort(axis=1).argsort(axis=1)
    return ndtri((np.arange(neurons) + 0.5) / neurons)[rank]


@njit(cache=True, nogil=True)
def _mix(x):
    """A well mixed 64-bit number of each other one (splitmix64's finaliser)."""
    x = (x ^ (x >> _S30)) * _FIRST
    x = (x ^ (x >> _S27)) * _SECOND
    return x ^ (x >> _S31)


@njit(cache=True, nogil=True)
def _fill_uniform(key, values):
    """Numbers between 0 and 1, both left out, into ``values`` [count]."""
    for i in range(values.size):
        values[i] = (
            np.float64(_mix(key + np.uint64(i) * _GOLDEN) >> np.uint64(12)) + 0.5
        ) / 4503599627370496.0


@njit(cache=True, nogil=True)
def _fill_planes(log_odds, shifts, planes):
    """Binary digits of the probabilities of ``log_odds`` [layer, neuron] plus each of ``shifts``.

    ``planes`` [shift, layer, word, digit]: bit i of a word is a digit of neuron i's probability, digit 0 the
    last.
    """
    levels, layers, words, _ = planes.shape
    for level in range(levels):
        for layer in range(layers):
            for w in range(words):
                for b in range(BITS):
                    planes[level, layer, w, b] = _ZERO
                for j in range(min(64, log_odds.shape[1] - 64 * w)):
                    chance = 1.0 / (1.0 + np.exp(-(log_odds[layer, 64 * w + j] + shifts[level])))
                    digits = np.uint64(min(chance * 2.0**BITS + 0.5, 2.0**BITS - 1.0))
                    for b in range(BITS):
                        planes[level, layer, w, b] |= ((digits >> np.uint64(b)) & _ONE) << np.uint64(j)


@njit(inline="always")
def _draw(digits, key):
    """64 draws at once: bit i is 1 with the probability whose digits are bit i of ``digits`` [digit].

    Random digits are compared from the first on until all 64 are decided, after 8 or so.
    """
    drawn, open_ = _ZERO, _ALL
    for b in range(BITS - 1, -1, -1):
        random = _mix(key + np.uint64(b) * _GOLDEN)
        drawn |= open_ & digits[b] & ~random
        open_ &= ~(digits[b] ^ random)
        if open_ == _ZERO:
            break
    return drawn


@njit(inline="always")
def _kept(keep, key):
    """64 draws of the same probability ``keep`` / 2 ** BITS."""
    drawn, open_ = _ZERO, _ALL
    for b in range(BITS - 1, -1, -1):
        random = _mix(key + np.uint64(32 + b) * _GOLDEN)
        if (keep >> np.uint64(b)) & _ONE:
            drawn |= open_ & ~random
            open_ &= random
        else:
            open_ &= ~random
        if open_ == _ZERO:
            break
    return drawn


@njit(cache=True, nogil=True)
def _walk(planes, keep, token_key, active_key, position, fresh, state, active):
    """Go on from ``state`` [layer, word] through the tokens at ``position``; writes ``active`` [token, layer,
    word].
    """
    levels, layers, words, _ = planes.shape
    for t in range(position.size):
        at = np.uint64(position[t])
        level = np.int64(_mix(token_key + at * _GOLDEN) % np.uint64(levels))
        token = _mix(active_key + at * _GOLDEN)
        for layer in range(layers):
            key = _mix(token + np.uint64(layer) * _GOLDEN)
            for w in range(words):
                mine = key + np.uint64(64 * w) * _GOLDEN
                drawn = _draw(planes[level, layer, w], mine)
                if keep != _ZERO and not fresh:
                    kept = _kept(keep, mine)
                    drawn = (kept & state[layer, w]) | (~kept & drawn)
                state[layer, w] = drawn
                active[t, layer, w] = drawn
        fresh = False


@njit(inline="always")
def _bell(x):
    """A number of mean 0 and variance 1 from 64 random bits: the sum of four uniform ones."""
    total = np.float64(0)
    for part in range(4):
        total += np.float64((x >> np.uint64(16 * part)) & np.uint64(0xFFFF))
    return (total / 65535.0 - 2.0) * 1.7320508075688772


@njit(inline="always")
def _code(log_magnitude):
    """``trace.encode_levels`` of exp(log magnitude), on a scale whose logarithm is taken off already."""
    return np.uint8(min(max(np.rint(255 + 16 * 1.4426950408889634 * log_magnitude), 1.0), 255.0))


@njit(cache=True, nogil=True)
def _fill_levels(log_odds, key, position, active, score, contribution):
    """Codes of the active neurons into ``score`` and ``contribution`` [token, layer, neuron]."""
    layers, neurons = log_odds.shape
    for t in range(position.size):
        token = _mix(key + np.uint64(position[t]) * _GOLDEN)
        for layer in range(layers):
            mine = _mix(token + np.uint64(layer) * _GOLDEN)
            for n in range(neurons):
                if (active[t, layer, n >> 6] >> np.uint64(n & 63)) & _ONE:
                    gate = SCORE_SLOPE * (log_odds[layer, n] - 5.0)
                    gate += SCORE_SD * (_bell(_mix(mine + np.uint64(2 * n) * _GOLDEN)) - 3.0)
                    up = UP_SD * (_bell(_mix(mine + np.uint64(2 * n + 1) * _GOLDEN)) - 2.0)
                    score[t, layer, n] = _code(gate)
                    contribution[t, layer, n] = _code(gate + up)
