"""A predictor by its quality: predicted sets of given recall and precision, drawn from the true ones.

What PowerInfer and DynamicInfer compute is the predicted set. A neuron that is active is predicted with
probability ``recall``; one that is not with the probability that gives ``precision`` at the layer's density.
Each is drawn by itself: that a predictor errs alike from token to token, or most where a neuron is often
active, is not modelled.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, types

from dinfer.errors import InputError
from dinfer.model import ModelSpec
from dinfer.trace import Trace

BITS = 24
"""Binary digits of a probability."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


class Predictor(NamedTuple):
    """What a replay takes from a predictor.

    ``predictions`` uint64 [decode token, layer, words]; ``rank`` of its two matrices, which say what it
    costs; ``thresholds`` float64 [layer, 5, levels], a threshold policy's tables (policies.balanced), no
    levels: fixed.
    """

    predictions: np.ndarray
    rank: int = 0
    thresholds: np.ndarray = np.zeros((0, 5, 0))


def with_predictor(
    trace: Trace, recall: float | np.ndarray, precision: float | np.ndarray, seed: int = 0
) -> np.ndarray:
    """Predicted sets of every token of ``trace``: uint64 [token, layer, words].

    ``recall`` and ``precision`` are of each layer, or one for all. A set depends on the seed, the token's
    sequence and position, the layer's density in ``trace`` and the true set alone. Raises InputError for
    values outside 0 to 1, or for a precision that would take more false positives than there are inactive
    neurons.
    """
    layers = trace.spec.layers
    recalls = _of_each_layer("recall", recall, layers)
    chance = false_chance(recalls, _of_each_layer("precision", precision, layers), trace.density)
    if (chance > 1).any():
        layer = int(np.argmax(chance))
        found = recalls[layer] * trace.density[layer]
        least = found / (found + 1 - trace.density[layer])
        raise InputError(
            f"precision {np.broadcast_to(precision, layers)[layer]:g} at recall {recalls[layer]:g} predicts "
            f"more neurons of layer {layer} than there are; give at least {least:.3f}"
        )
    keys = _token_keys(trace, seed)
    predicted = np.empty(trace.active.shape, np.uint64)
    digits = np.rint(np.stack([recalls, chance]) * 2**BITS).astype(np.uint64)
    _fill(np.ascontiguousarray(trace.active), keys, digits, _tail(trace.spec), predicted)
    return predicted


def false_chance(recall: np.ndarray, precision: np.ndarray, density: np.ndarray) -> np.ndarray:
    """Probability that an inactive neuron is predicted, float64 [layer].

    From precision = recall d / (recall d + chance (1 - d)).
    """
    false = recall * density * (1 / precision - 1)
    return false / np.maximum(1 - density, 1e-12)


def implied_precision(recall: float, density: float, predicted: float) -> float:
    """Precision of a predictor that asks for the share ``predicted`` where ``density`` is active
    (models.md)."""
    return recall * density / predicted


def predictor_rank(spec: ModelSpec, share: float) -> int:
    """Rank at which the predictors of all layers (hidden x rank x neurons, fp16) take ``share`` of the
    model's bytes.

    PowerInfer publishes 4.88 to 8.68% of the parameters. With int4 weights the predictor counts as quantised
    too.
    """
    whole = spec.ffn_bytes + spec.dense_bytes
    return round(share * whole / (spec.layers * 2 * (spec.hidden + spec.neurons)))


def predictor_bytes(spec: ModelSpec, rank: int) -> int:
    """Bytes of GPU memory that the predictors of all layers take."""
    return spec.layers * rank * (spec.hidden + spec.neurons) * 2


def _of_each_layer(name: str, value: float | np.ndarray, layers: int) -> np.ndarray:
    values = np.asarray(value, float)
    if values.ndim and values.shape != (layers,):
        raise InputError(
            f"{name} has shape {values.shape}; it must be one number or {layers}, one for each layer"
        )
    if not ((values > 0) & (values <= 1)).all():
        raise InputError(f"{name} is {value}; it must be above 0 and at most 1")
    return np.broadcast_to(values, layers).astype(float)


def _token_keys(trace: Trace, seed: int) -> np.ndarray:
    sequence = trace.tokens["sequence"].to_numpy(np.uint64)
    position = trace.tokens["position"].to_numpy(np.uint64)
    keys = np.empty(len(trace), np.uint64)
    _fill_keys(np.uint64(seed), sequence, position, keys)
    return keys


def _tail(spec: ModelSpec) -> np.uint64:
    used = spec.neurons % 64
    return np.uint64(2**used - 1) if used else _ALL


@njit(cache=True, nogil=True)
def _mix(x):
    # splitmix64's finaliser
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)
def _fill_keys(seed, sequence, position, keys):
    start = _mix(seed + _GOLDEN)
    for t in range(keys.size):
        keys[t] = _mix(_mix(start + sequence[t] * _GOLDEN) + position[t])


@njit(inline="always")
def _draws(digits, key):
    # 64 draws of probability digits / 2 ** BITS: random digits are compared until all are decided
    if digits >> np.uint64(BITS):
        return _ALL
    drawn, open_ = np.uint64(0), _ALL
    for b in range(BITS - 1, -1, -1):
        random = _mix(key + np.uint64(b) * _GOLDEN)
        if (digits >> np.uint64(b)) & np.uint64(1):
            drawn |= open_ & ~random
            open_ &= random
        else:
            open_ &= ~random
        if open_ == 0:
            break
    return drawn


@njit(
    types.void(
        types.uint64[:, :, ::1],
        types.uint64[::1],
        types.uint64[:, ::1],
        types.uint64,
        types.uint64[:, :, ::1],
    ),
    cache=True,
    nogil=True,
)
def _fill(active, keys, digits, tail, predicted):
    tokens, layers, words = active.shape
    for t in range(tokens):
        for layer in range(layers):
            mine = _mix(keys[t] + np.uint64(layer) * _GOLDEN)
            for w in range(words):
                key = mine + np.uint64(64 * w) * _GOLDEN
                kept = _draws(digits[0, layer], key)
                false = _draws(digits[1, layer], key + np.uint64(32) * _GOLDEN)
                predicted[t, layer, w] = (active[t, layer, w] & kept) | (~active[t, layer, w] & false)
            predicted[t, layer, words - 1] &= tail
