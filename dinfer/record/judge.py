"""How good predicted sets are, at every threshold at once: recall, precision, density, missed contribution."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import pandas as pd

from dinfer import bits
from dinfer.errors import InputError
from dinfer.predictors import Predictors
from dinfer.trace import Trace, decode_levels

CHUNK = 1024
"""Tokens that are read at once."""

LOGITS = np.linspace(-12.0, 12.0, 481)
PLACES = np.linspace(0.0, 1.0, 513)
"""Edges of equal bins: of predictors' logits, and of scores that are a place in an order."""

Progress = Callable[[int, int], None] | None


class Chunk(NamedTuple):
    """Some tokens of one layer: residuals [tokens, hidden] of its source, active bool and contribution codes uint8
    [tokens, neurons], and who was active at the token before."""

    layer: int
    hidden: np.ndarray
    active: np.ndarray
    codes: np.ndarray
    before: np.ndarray


Score = Callable[[Chunk], np.ndarray]
"""Scores [tokens, neurons] of a chunk: the larger, the sooner a neuron is predicted."""


class Curves(NamedTuple):
    """What a score's threshold does to each layer, float64 [layer, bin] by bins of the score between ``edges``.

    ``total`` counts neurons, ``active`` those that were active, ``power`` sums over tokens the share of the layer's
    squared contributions. The properties are float64 [layer, edge]: of predicting where score >= edge.
    """

    edges: np.ndarray
    total: np.ndarray
    active: np.ndarray
    power: np.ndarray
    tokens: int

    @classmethod
    def measure(
        cls,
        trace: Trace,
        rows: np.ndarray,
        scores: Sequence[tuple[Score, np.ndarray]],
        lookahead: int,
        progress: Progress = None,
    ) -> list[Self]:
        """The curves of each of ``scores`` with its edges over the tokens ``rows`` of ``trace``, chunk by chunk."""
        spec = trace.spec
        sums = [np.zeros((3, spec.layers, len(edges) + 1)) for _, edges in scores]
        for start in range(0, len(rows), CHUNK):
            for chunk in _chunks(trace, rows[start : start + CHUNK], lookahead):
                power = _power(chunk)
                for (score, edges), sum_ in zip(scores, sums, strict=True):
                    found = _bins(score(chunk), edges)
                    count, active = len(edges) + 1, found[chunk.active]
                    sum_[0, chunk.layer] += np.bincount(found.ravel(), minlength=count)
                    sum_[1, chunk.layer] += np.bincount(active, minlength=count)
                    sum_[2, chunk.layer] += np.bincount(active, power[chunk.active], count)
            if progress is not None:
                progress(min(start + CHUNK, len(rows)), len(rows))
        return [cls(edges, sum_[0], sum_[1], sum_[2], len(rows)) for (_, edges), sum_ in zip(scores, sums, strict=True)]

    @property
    def recall(self) -> np.ndarray:
        """Share of the active neurons that is predicted."""
        return _above(self.active) / np.maximum(self.active.sum(axis=1, keepdims=True), 1)

    @property
    def precision(self) -> np.ndarray:
        """Share of the predicted neurons that is active; 1 where none is predicted."""
        predicted = _above(self.total)
        return np.where(predicted > 0, _above(self.active) / np.maximum(predicted, 1), 1.0)

    @property
    def predicted(self) -> np.ndarray:
        """Predicted density."""
        return _above(self.total) / self.total.sum(axis=1, keepdims=True)

    @property
    def density(self) -> np.ndarray:
        """True density: float64 [layer]."""
        return self.active.sum(axis=1) / self.total.sum(axis=1)

    @property
    def missed(self) -> np.ndarray:
        """Share of the output's norm that is lost, root mean square over tokens.

        Of one token sqrt(sum of the missed neurons' contribution^2 / sum of the active ones'), as if the down columns
        were at right angles; ``output_error`` measures it without that assumption.
        """
        below = np.cumsum(self.power, axis=1)[:, :-1]
        return np.sqrt(below / max(self.tokens, 1))

    def operating_edges(self, bound: float) -> np.ndarray:
        """Index of the largest edge at which a layer misses at most ``bound``: int [layer], -1 where none does."""
        return (self.missed <= bound).sum(axis=1) - 1

    def at(self, edge: np.ndarray) -> dict[str, np.ndarray]:
        """Recall, precision, predicted density and missed contribution [layer] at an edge of each layer (-1: all)."""
        everything: dict[str, Any] = {"recall": 1.0, "precision": self.density, "predicted": 1.0, "missed": 0.0}
        rows = np.arange(len(edge))
        return {
            name: np.where(edge >= 0, getattr(self, name)[rows, np.maximum(edge, 0)], whole)
            for name, whole in everything.items()
        }

    def at_density(self, wanted: np.ndarray) -> dict[str, np.ndarray]:
        """The same [layer] where the predicted density is ``wanted`` [layer], between edges by a straight line."""
        found = {}
        for name in ("recall", "precision", "missed"):
            values = getattr(self, name)
            pairs = zip(wanted, self.predicted, values, strict=True)
            found[name] = np.array([np.interp(d, p[::-1], v[::-1]) for d, p, v in pairs])
        return found


    def at_missed(self, wanted: np.ndarray) -> np.ndarray:
        """The predicted density [layer] at which ``wanted`` [layer] is missed."""
        pairs = zip(wanted, self.missed, self.predicted, strict=True)
        return np.array([np.interp(w, m, p) for w, m, p in pairs])


def _above(bins: np.ndarray) -> np.ndarray:
    """Sum of the bins at and above each edge."""
    return np.cumsum(bins[:, ::-1], axis=1)[:, ::-1][:, 1:]


def nearest_edge(cuts: np.ndarray) -> np.ndarray:
    """Index of the edge of LOGITS nearest to each of ``cuts``, -1 for -inf."""
    place = np.rint((np.maximum(cuts, LOGITS[0]) - LOGITS[0]) / (LOGITS[1] - LOGITS[0]))
    return np.where(np.isneginf(cuts), -1, np.minimum(place, len(LOGITS) - 1)).astype(np.int64)


def _bins(scores: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Number of equally spaced ``edges`` at or below each score: int32, same shape."""
    step = np.float32(edges[1] - edges[0])
    place = (scores.astype(np.float32) - np.float32(edges[0])) / step
    return (np.clip(np.floor(place), -1, len(edges) - 1) + 1).astype(np.int32)


def _chunks(trace: Trace, rows: np.ndarray, lookahead: int) -> Iterator[Chunk]:
    spec = trace.spec
    assert trace.hidden is not None
    assert trace.contribution is not None
    hidden, codes = trace.hidden[rows], trace.contribution[rows]
    active = bits.unpack(trace.active[rows], spec.neurons)
    sequence = trace.tokens["sequence"].to_numpy()
    known = (rows > 0) & (sequence[rows] == sequence[rows - 1])
    before = bits.unpack(trace.active[rows - 1], spec.neurons) & known[:, None, None]
    for layer in range(spec.layers):
        source = max(0, layer - lookahead)
        yield Chunk(layer, hidden[:, source], active[:, layer], codes[:, layer], before[:, layer])


def _power(chunk: Chunk) -> np.ndarray:
    """Each active neuron's share of its token's squared contributions."""
    power = decode_levels(chunk.codes, 1.0) ** 2 * chunk.active
    return power / np.maximum(power.sum(axis=1, keepdims=True), np.float32(1e-30))


def check_judged(trace: Trace) -> None:
    """Raise InputError unless ``trace`` holds what predictors are trained and judged on."""
    for name in ("hidden", "contribution"):
        if getattr(trace, name) is None:
            raise InputError(f"the trace holds no {name}; record it with --hidden and with its levels")


class Split(NamedTuple):
    """Decode tokens that are learnt, and those of like prompts that stop it: row numbers, ascending."""

    train: np.ndarray
    validation: np.ndarray


VALIDATION_EVERY = 8
"""Every eighth of the prompts that are not held out stops the training, and sets thresholds where no domain does."""


def split(trace: Trace, hold_out: tuple[str, ...]) -> Split:
    """Rows of the prompts that are of no domain in ``hold_out``, by prompt: every eighth for validation.

    Raises InputError for a domain that the trace does not name, and when no prompt is left for one of the two.
    """
    indices, place = trace.meta.get("prompt_indices", ()), _places_of_prompts(trace)
    order = np.array(indices) if len(indices) else np.arange(int(place.max(initial=0)) + 1)
    learnt = ~_prompts_of(trace, hold_out, len(order))
    others = np.sort(order[learnt])
    validation = np.isin(order, others[VALIDATION_EVERY // 2 :: VALIDATION_EVERY]) & learnt
    decoded = (trace.tokens["phase"] == "decode").to_numpy()
    parts = [np.flatnonzero(decoded & of[place]) for of in (learnt & ~validation, validation)]
    for name, part in zip(("train on", "validate on"), parts, strict=True):
        if not len(part):
            raise InputError(f"the trace has no decode token to {name}; record more prompts or hold out fewer domains")
    return Split(*parts)


def of_domains(trace: Trace, domains: tuple[str, ...]) -> np.ndarray:
    """Decode tokens (row numbers, ascending) whose prompt is of one of ``domains``.

    Raises InputError for a domain that the trace does not name, and when it has no decode token of any.
    """
    place = _places_of_prompts(trace)
    decoded = (trace.tokens["phase"] == "decode").to_numpy()
    rows = np.flatnonzero(decoded & _prompts_of(trace, domains, int(place.max(initial=0)) + 1)[place])
    if not len(rows):
        raise InputError(f"the trace has no decode token of {', '.join(domains)}; record more prompts or name others")
    return rows


def _places_of_prompts(trace: Trace) -> np.ndarray:
    """Place in the trace's list of prompts of each row's prompt; without a list a sequence is a prompt."""
    indices, sequence = trace.meta.get("prompt_indices", ()), trace.tokens["sequence"].to_numpy()
    return sequence % max(len(indices), 1) if len(indices) else sequence


def _prompts_of(trace: Trace, wanted: tuple[str, ...], prompts: int) -> np.ndarray:
    """Whether each of the trace's ``prompts`` is of one of the ``wanted`` domains."""
    domains = trace.meta.get("domains", ())
    known = sorted(set(domains))
    for name in wanted:
        if name not in known:
            raise InputError(f"domain {name!r} is not in the trace; it holds {', '.join(known) or 'no domains'}")
    return np.isin(np.array(domains, object), wanted) if len(domains) else np.zeros(prompts, bool)


def predictor_score(predictors: Predictors) -> Score:
    """The trained predictors' logits."""
    return lambda chunk: predictors.logits(chunk.layer, chunk.hidden)


def static_score(frequency: np.ndarray) -> Score:
    """A hot set that never changes: each neuron's place by ``frequency`` [layer, neuron], 0 to 1."""
    places = _places(frequency)
    return lambda chunk: np.broadcast_to(places[chunk.layer], chunk.active.shape)


def previous_score(frequency: np.ndarray) -> Score:
    """The token before's active set first, then the others, each by ``frequency``."""
    places = _places(frequency)
    return lambda chunk: (chunk.before + places[chunk.layer]) / 2


def oracle_score(chunk: Chunk) -> np.ndarray:
    """The neurons by their own contribution, which only a computed layer knows: the magnitude oracle."""
    return _places(chunk.codes * chunk.active)


def _places(values: np.ndarray) -> np.ndarray:
    """Place of each of ``values`` in its row, ascending, above 0 and up to 1 (float32)."""
    order = values.argsort(axis=-1, kind="stable")
    places = np.empty(values.shape, np.float32)
    count = values.shape[-1]
    np.put_along_axis(places, order, (np.arange(count, dtype=np.float32) + 1) / count, axis=-1)
    return places


def frequency_of(trace: Trace, rows: np.ndarray) -> np.ndarray:
    """Share of the tokens ``rows`` in which each neuron is active: float32 [layer, neuron]."""
    total = np.zeros((trace.spec.layers, trace.spec.neurons), np.int64)
    for start in range(0, len(rows), CHUNK):
        total += bits.unpack(trace.active[rows[start : start + CHUNK]], trace.spec.neurons).sum(axis=0)
    return (total / max(len(rows), 1)).astype(np.float32)


def ways(
    predictors: Predictors, trace: Trace, rows: np.ndarray, frequency: np.ndarray, progress: Progress = None
) -> dict[str, Curves]:
    """Curves over the tokens ``rows`` of the trained predictor and its rivals.

    ``static`` is the hot set of ``frequency``, ``previous`` the token before's, ``oracle`` the largest contributions.
    """
    check_judged(trace)
    predictors.check_trace(trace)
    scores: dict[str, tuple[Score, np.ndarray]] = {
        "trained": (predictor_score(predictors), LOGITS),
        "static": (static_score(frequency), PLACES),
        "previous": (previous_score(frequency), PLACES),
        "oracle": (oracle_score, PLACES),
    }
    curves = Curves.measure(trace, rows, list(scores.values()), predictors.lookahead, progress)
    return dict(zip(scores, curves, strict=True))


def evaluate(predictors: Predictors, curves: Mapping[str, Curves]) -> pd.DataFrame:
    """One row a layer of ``ways``: the trained predictor at its threshold, its rivals at the same size.

    ``matched_recall`` is the recall (= precision) where as many neurons are predicted as are active; ``size`` the
    share of the neurons with which a rival misses as little as the trained predictor does.
    """
    spec, trained = predictors.spec, curves["trained"]
    point = trained.at(nearest_edge(predictors.cuts))
    frame = pd.DataFrame(
        {
            "layer": range(spec.layers),
            "k": [layer - predictors.source(layer) for layer in range(spec.layers)],
            "rank": predictors.ranks,
            "threshold": predictors.thresholds.astype(float),
            "density": trained.density,
            **point,
            "matched_recall": trained.at_density(trained.density)["recall"],
        }
    )
    for name in ("static", "previous", "oracle"):
        curve = curves[name]
        same = curve.at_density(point["predicted"])
        frame[f"{name}_recall"], frame[f"{name}_missed"] = same["recall"], same["missed"]
        frame[f"{name}_matched_recall"] = curve.at_density(curve.density)["recall"]
        frame[f"{name}_size"] = curve.at_missed(point["missed"])
    return frame


def calibration(curves: Curves, bins: int = 10) -> pd.DataFrame:
    """How often a neuron was active whose predicted probability lay in each of ``bins`` equal parts, all layers."""
    middle = np.concatenate([LOGITS[:1], (LOGITS[1:] + LOGITS[:-1]) / 2, LOGITS[-1:]])
    chance = 1 / (1 + np.exp(-middle))
    total, active = curves.total.sum(axis=0), curves.active.sum(axis=0)
    part = np.minimum((chance * bins).astype(int), bins - 1)
    count, hit, said = (np.bincount(part, w, bins) for w in (total, active, total * chance))
    return pd.DataFrame(
        {
            "from": np.arange(bins) / bins,
            "to": (np.arange(bins) + 1) / bins,
            "neurons": count.astype(np.int64),
            "predicted": said / np.maximum(count, 1),
            "active": hit / np.maximum(count, 1),
        }
    )


def modes(frame: pd.DataFrame, predictors: Predictors) -> pd.DataFrame:
    """What each way to run reads of the FFN's bytes for a token, from the figures of ``evaluate``; the least first.

    ``exact`` reads what tells activity of every neuron (gate first) and the rest of the active ones, and misses
    nothing. ``static`` and ``predicted`` read whole neurons; at the predictor's missed contribution, and it its bytes.
    """
    spec = predictors.spec
    examined = spec.examined_share
    share = predictors.bytes / (spec.layers * spec.neurons * 2 * spec.matrices * spec.hidden)
    missed = float(np.sqrt((frame["missed"] ** 2).mean()))
    rows = {
        "exact": (examined + (1 - examined) * frame["density"].mean(), 0.0),
        "static": (frame["static_size"].mean(), missed),
        "predicted": (frame["predicted"].mean() + share, missed),
    }
    table = pd.DataFrame([(name, float(read), lost) for name, (read, lost) in rows.items()])
    return table.set_axis(["mode", "ffn_share_read", "missed"], axis=1).sort_values("ffn_share_read", ignore_index=True)


def advice(table: pd.DataFrame) -> str:
    """One sentence: which of ``modes`` to run, and whether the predictor is worth its bytes."""
    read = table.set_index("mode")["ffn_share_read"]
    best, missed = str(read.idxmin()), float(table["missed"].max())
    figures = ", ".join(f"{name} {share:.1%}" for name, share in read.items())
    if best == "predicted":
        return f"run it predicted: a token reads {figures} of the FFN's bytes, {missed:.1%} of the output's norm missed"
    why = "loses nothing" if best == "exact" else f"misses as little ({missed:.1%})"
    return f"prediction is not worth its bytes: run it {best}, which {why}; a token reads {figures} of the FFN's bytes"
