"""What a trace shows about locality, layer by layer: a table and a figure. Loads no torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from dinfer import bits
from dinfer.errors import InputError
from dinfer.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHUNK = 64
"""Tokens that are unpacked at a time."""

HOT_SHARE = 0.2
"""A sequence's hot set: so many of a layer's neurons, those most often active in it."""

HOT_SEQUENCES = 256
"""At most so many sequences, evenly spread, are compared by their hot sets."""

LAGS = (1, 2, 4)
"""Layers between two residuals whose cosine is taken."""


def stats(trace: Trace, phase: str | None = "decode") -> pd.DataFrame:
    """One row a layer; ``phase`` None takes all tokens (a shared system prompt then inflates locality).

    ``density``: mean share of active neurons. ``coverage_20``, ``coverage_40``: share of all activations that the
    20% and 40% most often active neurons make. ``share_80``: smallest share of neurons that makes 80%.
    ``jaccard_adjacent``: mean Jaccard distance of the active sets of adjacent tokens of a sequence.
    ``jaccard_independent``: 1 - E|A and B| / E|A or B| of two tokens drawn independently with the same per-neuron
    frequencies: with counts c of n tokens, |A and B| is sum c (c - 1) / (n (n - 1)), free of the bias of sum p^2.
    ``jaccard_hot``: mean distance of the hot sets of two sequences. ``cosine_1``, ``_2``, ``_4``: mean cosine of the
    residuals of this layer and the one so many layers on. NaN where there is nothing to compare.
    Raises InputError when the trace has no token of ``phase``.
    """
    order, starts = _order(trace, phase)
    counts, hot = _counts(trace, order, starts)
    columns = {
        "layer": np.arange(trace.spec.layers),
        "density": counts.mean(axis=1) / len(order),
        **_coverage(counts),
        "jaccard_adjacent": _adjacent(trace, order),
        "jaccard_independent": _independent(counts, len(order)),
        "jaccard_hot": _hot_distance(hot, trace.spec.neurons),
        **_cosines(trace, order),
    }
    return pd.DataFrame(columns)


def _order(trace: Trace, phase: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the phase by sequence and position, and where in them each sequence starts."""
    tokens = trace.tokens
    rows = np.arange(len(trace)) if phase is None else np.flatnonzero(tokens["phase"] == phase)
    if not len(rows):
        raise InputError(f"trace of {trace.spec.name} has 0 tokens of phase {phase!r}; take another")
    sequence = tokens["sequence"].to_numpy()[rows]
    order = rows[np.lexsort((tokens["position"].to_numpy()[rows], sequence))]
    return order, np.flatnonzero(np.diff(np.sort(sequence), prepend=-1))


def _chunks(rows: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), CHUNK):
        yield rows[start : start + CHUNK]


def _counts(trace: Trace, order: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Activations of each neuron: int64 [layer, neuron]; and the hot sets, words [layer, words] a sequence."""
    spec, total, hot = trace.spec, np.zeros((trace.spec.layers, trace.spec.neurons), np.int64), []
    chosen = np.unique(np.linspace(0, len(starts) - 1, HOT_SEQUENCES).round().astype(int))
    for number, rows in enumerate(np.split(order, starts[1:])):
        mine = np.zeros_like(total)
        for chunk in _chunks(rows):
            mine += bits.unpack(trace.active[chunk], spec.neurons).sum(axis=0)
        total += mine
        if number in chosen:
            hot.append(_hot_set(mine, np.random.default_rng(number)))
    return total, hot


def _hot_set(counts: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Words of the most often active neurons of each layer; ties by lot, never-active ones are not hot."""
    size = int(np.ceil(HOT_SHARE * counts.shape[1]))
    lots = counts + random.random(counts.shape)
    last = np.partition(lots, -size, axis=1)[:, -size, None]
    return bits.pack((lots >= last) & (counts > 0))


def _coverage(counts: np.ndarray) -> dict[str, np.ndarray]:
    neurons = counts.shape[1]
    ranked = np.sort(counts, axis=1)[:, ::-1].cumsum(axis=1)
    whole = np.where(ranked[:, -1:] > 0, ranked[:, -1:], np.nan)
    share = ranked / whole
    needed = (np.argmax(share >= 0.8, axis=1) + 1) / neurons
    return {
        "coverage_20": share[:, int(np.ceil(0.2 * neurons)) - 1],
        "coverage_40": share[:, int(np.ceil(0.4 * neurons)) - 1],
        "share_80": np.where(np.isnan(whole[:, 0]), np.nan, needed),
    }


def _adjacent(trace: Trace, order: np.ndarray) -> np.ndarray:
    """Mean Jaccard distance of neighbours in ``order`` that are one position apart in one sequence."""
    sequence = trace.tokens["sequence"].to_numpy()[order]
    position = trace.tokens["position"].to_numpy()[order]
    firsts = np.flatnonzero((np.diff(sequence) == 0) & (np.diff(position) == 1))
    if not len(firsts):
        return np.full(trace.spec.layers, np.nan)
    total = np.zeros(trace.spec.layers)
    for chunk in _chunks(firsts):
        total += _jaccard(trace.active[order[chunk]], trace.active[order[chunk + 1]]).sum(axis=0)
    return total / len(firsts)


def _jaccard(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Jaccard distance of sets of words [..., words]; two empty sets are equal."""
    shared, union = bits.count(a & b), bits.count(a | b)
    return np.where(union > 0, 1 - shared / np.maximum(union, 1), 0.0)


def _independent(counts: np.ndarray, tokens: int) -> np.ndarray:
    if tokens < 2:
        return np.full(len(counts), np.nan)
    shared = (counts * (counts - 1.0)).sum(axis=1) / (tokens * (tokens - 1.0))
    union = 2 * counts.sum(axis=1) / tokens - shared
    return 1 - np.divide(shared, union, out=np.ones_like(union), where=union > 0)


def _hot_distance(hot: list[np.ndarray], neurons: int) -> np.ndarray:
    """Mean distance over all pairs of sequences, layer by layer."""
    layers = len(hot[0])
    if len(hot) < 2:
        return np.full(layers, np.nan)
    distances = np.empty(layers)
    pairs = np.triu_indices(len(hot), 1)
    for layer in range(layers):
        members = bits.unpack(np.stack([words[layer] for words in hot]), neurons).astype(np.float32)
        shared, size = members @ members.T, members.sum(axis=1)
        union = size[:, None] + size[None] - shared
        similarity = np.divide(shared, union, out=np.ones_like(union), where=union > 0)
        distances[layer] = 1 - similarity[pairs].mean(dtype=np.float64)
    return distances


def _cosines(trace: Trace, order: np.ndarray) -> dict[str, np.ndarray]:
    layers = trace.spec.layers
    sums = {lag: np.full(layers, np.nan) for lag in LAGS}
    if trace.hidden is not None:
        for lag in LAGS:
            sums[lag][: max(layers - lag, 0)] = 0
        for chunk in _chunks(order):
            states = trace.hidden[chunk].astype(np.float32)
            states /= np.maximum(np.linalg.norm(states, axis=2, keepdims=True), 1e-12)
            for lag in LAGS:
                cosine = (states[:, :-lag] * states[:, lag:]).sum(axis=2)
                sums[lag][: cosine.shape[1]] += cosine.sum(axis=0)
    return {f"cosine_{lag}": total / len(order) for lag, total in sums.items()}


PANELS = {
    "active neurons (share)": {"density": "density"},
    "activations covered (share)": {
        "coverage_40": "top 40% of neurons",
        "coverage_20": "top 20% of neurons",
        "share_80": "neurons needed for 80%",
    },
    "Jaccard distance": {
        "jaccard_independent": "independent draws",
        "jaccard_adjacent": "adjacent tokens",
        "jaccard_hot": "hot sets of sequences",
    },
    "residual cosine": {f"cosine_{lag}": f"{lag} layer{'s' * (lag > 1)} apart" for lag in LAGS},
}
"""Axis label -> column -> legend, of each panel of the figure."""

COLOURS = ("#0072B2", "#D55E00", "#009E73")  # Okabe-Ito, told apart by colour-blind readers
STYLES = ("-", "--", ":")


def plot_stats(frame: pd.DataFrame) -> "Figure":
    """The table of ``stats`` as a figure of four panels over the layers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    for axes, (label, columns) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        _panel(axes, frame, label, columns)
    return figure


def _panel(axes: "Axes", frame: pd.DataFrame, label: str, columns: dict[str, str]) -> None:
    for (column, legend), colour, style in zip(columns.items(), COLOURS, STYLES, strict=False):
        if frame[column].notna().any():
            axes.plot(frame["layer"], frame[column], style, color=colour, label=legend, marker=".")
    axes.set_xlabel("layer")
    axes.set_ylabel(label)
    lowest = float(frame[list(columns)].min().min())
    axes.set_ylim(min(0.0, lowest) if lowest == lowest else 0.0, 1.0)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(loc="lower right", ncols=2, fontsize="small", framealpha=0.85, edgecolor="none")
    else:
        axes.text(0.5, 0.5, "not recorded", ha="center", transform=axes.transAxes)
