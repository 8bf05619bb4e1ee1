"""Levels of two-sided thresholds from a recorded trace: what each takes in or leaves out, in neurons and in error."""

from typing import NamedTuple

import numpy as np

from dinfer import bits
from dinfer.errors import InputError
from dinfer.placement import Placement
from dinfer.policies.balanced import ADDED, DROPPED, LOST, RECOVERED, SKIPPED, Balanced, Levels
from dinfer.trace import Trace, decode_levels

CODES = 256
TOKENS = 1024
"""At most so many of a trace's tokens are read, evenly spread: a mean over some 10**5 neurons below a threshold."""


def recorded_levels(trace: Trace, placement: Placement, policy: Balanced) -> Levels:
    """The levels of ``policy`` around the activity thresholds of ``trace``, with ``placement``'s residents.

    A level of the GPU is one code of the recorded scores below the threshold, a sixteenth of an octave, the last is 0,
    where it computes all of its residents, or a ReLU kind's own t, where it computes all that are not 0. A level of the
    CPU leaves out an equal share by their gates: of magnitude kinds of all its neurons, whose gates then save reading
    up, of ReLU kinds, where inactive neurons are not read further anyway, of its active ones. Errors are squared
    contributions, means over the trace's tokens. Raises InputError for a trace without levels, or of a model whose
    neurons below the threshold contribute nothing.
    """
    _check(trace)
    relu, own = trace.spec.sparsity_kind == "relu", trace.spec.gate_threshold
    picked = np.unique(np.linspace(0, len(trace) - 1, min(len(trace), TOKENS)).astype(int))
    layers, levels = trace.spec.layers, policy.levels + 1
    gpu, cpu = np.zeros((2, layers, levels), np.float32)
    tables, expected = np.zeros((layers, 5, levels)), np.zeros((layers, 4), np.int64)
    residents = bits.unpack(placement.resident, trace.spec.neurons)
    for layer in range(layers):
        heard, resident = _heard(trace, picked, layer), residents[layer]
        threshold, scale = trace.meta["thresholds"][layer], trace.meta["score_scale"][layer]
        spare, hits = ~heard.active & resident, heard.active & resident
        cuts = codes_below(threshold - own, scale, policy.levels)
        if relu:
            cuts = np.maximum(cuts, 0.5)  # code 0 is a gate up to the model's own threshold: nothing to compute
        gpu[layer, 1:-1], gpu[layer, 0], gpu[layer, -1] = own + code_value(cuts, scale)[1:-1], threshold, own
        below = _below(heard.score, heard.error, spare, cuts)
        tables[layer, [ADDED, RECOVERED]] = (below[:, :1] - below) / max(spare.sum(), 1)

        cold, misses = np.broadcast_to(~resident, spare.shape), heard.active & ~resident
        cuts = _even_cuts(heard.gate[misses if relu else cold], policy.levels)
        cpu[layer, 1:] = own + code_value(cuts, trace.meta["score_scale" if relu else "gate_scale"][layer])[1:]
        tables[layer, [DROPPED, LOST]] = _below(heard.gate, heard.error, misses, cuts) / max(misses.sum(), 1)
        if not relu:
            tables[layer, SKIPPED] = _below(heard.gate, heard.error, cold, cuts)[0] / max(cold.sum(), 1)
        counts = np.array([each.sum() for each in (hits, spare, misses, cold)]) / len(picked)
        expected[layer] = np.rint(counts)
    return Levels(gpu, cpu, tables, expected)


class _Heard(NamedTuple):
    """One layer of a trace [token, neuron]: who was active, codes of score and gate, squared contributions.

    A ReLU kind's score is its gate's value above the model's own threshold.
    """

    active: np.ndarray
    score: np.ndarray
    gate: np.ndarray
    error: np.ndarray


def _heard(trace: Trace, tokens: np.ndarray, layer: int) -> _Heard:
    assert trace.score is not None
    assert trace.contribution is not None
    active = bits.unpack(trace.active[tokens, layer], trace.spec.neurons)
    contribution = decode_levels(trace.contribution[tokens, layer], trace.meta["contribution_scale"][layer])
    score = trace.score[tokens, layer]
    gate = score if trace.gate is None else trace.gate[tokens, layer]
    return _Heard(active, score, gate, contribution**2)


def codes_below(threshold: float, scale: float, levels: int) -> np.ndarray:
    """Where the levels cut the scale of codes, float64 [levels + 1]: first at ``threshold``, last below all codes.

    Cuts lie between codes, so that which side a recorded magnitude is on is known.
    """
    at = CODES - 1 + 16 * np.log2(max(threshold / scale, 2.0**-16))
    cuts = np.ceil(at - 0.5) + 0.5 - np.arange(levels + 1)
    cuts[0], cuts[-1] = CODES, -0.5  # none of those that are inactive is above the threshold
    return cuts


def code_value(cuts: np.ndarray, scale: float) -> np.ndarray:
    """Magnitudes at which ``cuts`` divide the codes on ``scale``."""
    return scale * np.exp2((cuts - (CODES - 1)) / 16)


def _even_cuts(codes: np.ndarray, levels: int) -> np.ndarray:
    """Cuts below which lie about 0, 1, ... ``levels`` of ``levels + 1`` equal parts of ``codes``."""
    below = np.cumsum(np.bincount(codes, minlength=CODES))
    return np.searchsorted(below, np.arange(levels + 1) / (levels + 1) * below[-1]) - 0.5


def _below(codes: np.ndarray, errors: np.ndarray, chosen: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Of the ``chosen`` [token, neuron], below each cut: their count and their error, float64 [2, levels]."""
    picked = codes[chosen]
    sums = np.zeros((2, CODES + 1))
    sums[0, 1:] = np.cumsum(np.bincount(picked, minlength=CODES))
    sums[1, 1:] = np.cumsum(np.bincount(picked, errors[chosen], minlength=CODES))
    return sums[:, np.clip(np.ceil(cuts), 0, CODES).astype(int)]


def _check(trace: Trace) -> None:
    spec = trace.spec
    if spec.sparsity_kind == "relu" and not spec.raised(trace.meta.get("thresholds", ())):
        raise InputError(
            f"{spec.name} is a {spec.activation} model at its own threshold of {spec.gate_threshold:g}, below which "
            "neurons contribute nothing that balanced thresholds could trade; record it with a higher --sparsity, or "
            "plan with --threshold fixed"
        )
    if spec.sparsity_kind == "magnitude" and not spec.gated:
        raise InputError(
            f"{spec.name} is a {spec.activation} model without gates: balanced thresholds need gated neurons that "
            "contribute a little below their threshold; plan with --threshold fixed"
        )
    needed = ("score", "contribution", *("gate",) * (spec.sparsity_kind == "magnitude"))
    missing = [name for name in needed if getattr(trace, name) is None]
    if missing:
        raise InputError(
            f"the trace has no {missing[0]}, of which balanced thresholds are made; record it with --levels, or plan "
            "with --threshold fixed"
        )
