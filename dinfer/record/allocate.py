"""Magnitude thresholds of all layers under one model-wide error: how the wanted sparsity is shared out.

Greedy, after TEAL, which shares a block's sparsity out among its matrices by the block's output error: here among
layers, by the error of the logits. What layer l adds to it is taken as ``weight[l] * error[l]``: the squared
contributions that its threshold drops, which are its output's squared change (policies/balanced.py), times how many
nats of divergence one unit of that was measured to cause when only this layer is thresholded. Errors of several
layers are taken to add up.
"""

from collections.abc import Callable

import numpy as np
import torch

from dinfer.record.generate import Loaded, thresholded

STEPS = 100
"""Parts of a layer's neurons, by which its sparsity goes up."""

TOKENS = 256
"""Tokens over which the divergence is measured once a layer."""


def curves(counts: np.ndarray, errors: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each layer, the bin [layer, STEPS] below which lie 0, 1, ... parts of the values, and the error that drops.

    ``counts`` [layer, bin] and ``errors`` [layer, bin] (squared contributions) are histograms over magnitudes of
    ``tokens`` tokens; the second answer is float64 [layer, STEPS], squared contributions a token.
    """
    below, dropped = np.cumsum(counts, axis=1), np.cumsum(errors, axis=1)
    shares = np.arange(STEPS) / STEPS
    edges = np.array([np.searchsorted(row, shares * row[-1]) for row in below])
    edges[:, 0] = 0
    error = np.take_along_axis(dropped, edges, axis=1) / tokens
    error[:, 0] = 0
    return edges, error


@torch.inference_mode()
def sensitivities(
    loaded: Loaded,
    texts: list[list[int]],
    thresholds: np.ndarray,
    errors: np.ndarray,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Divergence of the logits, in nats a token, for one unit of each layer's error: float64 [layer].

    Measured over the first TOKENS tokens of ``texts`` with ``thresholds`` [layer] on one layer at a time, which drop
    ``errors`` [layer].
    """
    layers = loaded.spec.layers
    chosen = _first(texts, TOKENS)
    dense = [_log_likelihoods(loaded, text) for text in chosen]
    weights = np.zeros(layers)
    for layer in range(layers):
        alone = np.where(np.arange(layers) == layer, thresholds, -1.0)
        with thresholded(loaded, alone):
            sparse = [_log_likelihoods(loaded, text) for text in chosen]
        total = sum(float((a.exp() * (a - b)).sum()) for a, b in zip(dense, sparse, strict=True))
        weights[layer] = total / sum(map(len, chosen)) / max(errors[layer], 1e-30)
        if progress:
            progress(layer + 1, layers)
    return weights


def allocate(errors: np.ndarray, weights: np.ndarray, sparsity: float) -> np.ndarray:
    """Parts int [layer] that each layer drops, STEPS being all: the mean reaches ``sparsity``.

    Greedy: again and again the layer in which one part more costs least, by ``weights`` [layer] times the rise of
    ``errors`` [layer, STEPS]. The last part of a layer is never dropped.
    """
    layers = np.arange(len(errors))
    rises = np.maximum(weights, 0)[:, None] * np.diff(errors, axis=1)
    rises = np.concatenate([rises, np.full((len(errors), 1), np.inf)], axis=1)
    parts = np.zeros(len(errors), np.int64)
    for _ in range(min(round(sparsity * STEPS * len(errors)), len(errors) * (STEPS - 1))):
        parts[rises[layers, parts].argmin()] += 1
    return parts


def _first(texts: list[list[int]], tokens: int) -> list[list[int]]:
    chosen: list[list[int]] = []
    for text in texts:
        left = tokens - sum(map(len, chosen))
        if left < 2:
            break
        chosen.append(text[:left])
    return chosen


def _log_likelihoods(loaded: Loaded, text: list[int]) -> torch.Tensor:
    ids = torch.tensor([text], device=loaded.device)
    return loaded.model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(dim=-1)
