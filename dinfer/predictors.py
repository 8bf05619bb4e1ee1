"""Predictors: a low-rank map a layer, from the residual some layers before to the neurons that will be active.

A trained predictor is a directory; docs/predictor.md is the format. ``record/predictor.py`` trains one.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from dinfer import bits
from dinfer.document import read_arrays, read_document
from dinfer.errors import InputError
from dinfer.model import ModelSpec
from dinfer.trace import Trace

FORMAT = "dinfer-predictor"
VERSION = 2
"""Of the 8-bit format; 16-bit predictors are written as version 1, which lacks nothing but the scales."""
PARTS = ("first", "second", "bias")
BITS = 8, 16
LEVELS = 127
"""Steps of an 8-bit weight on either side of 0."""
CHUNK = 512
"""Tokens whose scores are held at once."""


@dataclass(frozen=True, eq=False)
class Predictors:
    """One low-rank predictor a layer, of one model at one lookahead.

    ``first`` [hidden, rank] and ``second`` [rank, neurons] of each layer (ranks differ) are float16, or int8 with
    ``scales`` float16 [rank + neurons], which multiply the columns of the one and of the other; ``bias`` is float16
    [neurons]. The logit of activity is ``(h / rms(h)) @ first @ second + bias``, with h the un-normalised
    residual after attention of layer ``source(layer)``. ``thresholds`` float32 [layer] is the operating point: a
    neuron is predicted where its probability is at least that (0: always). ``activity`` [layer] are the activity
    thresholds of the trace that it learnt. ``weights`` and ``trace`` are the fingerprints of what it was trained on,
    ``quality`` what was measured of it and ``training`` how it was made.
    """

    spec: ModelSpec
    lookahead: int
    first: Sequence[np.ndarray]
    second: Sequence[np.ndarray]
    bias: Sequence[np.ndarray]
    thresholds: np.ndarray
    activity: tuple[float, ...] = ()
    weights: str = ""
    trace: str = ""
    quality: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    scales: Sequence[np.ndarray] = ()

    def __post_init__(self) -> None:
        spec = self.spec
        if not 0 <= self.lookahead < spec.layers:
            raise InputError(f"predictor's lookahead is {self.lookahead}; it must be 0 to {spec.layers - 1} layers")
        for name in (*PARTS, "thresholds", *(["scales"] if self.bits == 8 else [])):
            if len(getattr(self, name)) != spec.layers:
                raise InputError(
                    f"predictor's {name} has {len(getattr(self, name))} layers; it must have {spec.layers}"
                )
        for layer, (first, second, bias) in enumerate(zip(self.first, self.second, self.bias, strict=True)):
            expected = (spec.hidden, second.shape[0]), (first.shape[1], spec.neurons), (spec.neurons,)
            if (first.shape, second.shape, bias.shape) != expected:
                raise InputError(
                    f"predictor of layer {layer} has shapes {first.shape}, {second.shape} and {bias.shape}; they must "
                    f"be ({spec.hidden}, rank), (rank, {spec.neurons}) and ({spec.neurons},)"
                )
        for layer, (scale, rank) in enumerate(zip(self.scales, self.ranks, strict=True) if self.scales else ()):
            if scale.shape != (rank + spec.neurons,):
                raise InputError(
                    f"predictor's scales of layer {layer} have shape {scale.shape}; it must be ({rank + spec.neurons},)"
                )
        if not ((self.thresholds >= 0) & (self.thresholds <= 1)).all():
            raise InputError("predictor's thresholds must be probabilities, 0 to 1")

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each layer's predictor."""
        return tuple(first.shape[1] for first in self.first)

    @property
    def bits(self) -> int:
        """Bits of a weight, 8 or 16."""
        return 8 * self.first[0].dtype.itemsize if len(self.first) else 16

    @property
    def rank(self) -> int:
        """The mean rank, rounded: at it every layer's step is counted to cost the same."""
        return round(sum(self.ranks) / self.spec.layers)

    @property
    def bytes(self) -> int:
        """Bytes of all layers' predictors as they are stored."""
        return sum(predictor_bytes(self.spec, rank, self.bits) for rank in self.ranks)

    def tag(self) -> dict[str, Any]:
        """What a plan says of its predictor: ``fingerprint``, ``lookahead``, mean ``rank`` and ``bytes``."""
        return {"fingerprint": self.fingerprint(), "lookahead": self.lookahead, "rank": self.rank, "bytes": self.bytes}

    @cached_property
    def _wide(self) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]:
        layers = [[a.astype(np.float32) for a in each] for each in zip(self.first, self.second, self.bias, strict=True)]
        for (first, second, _), scale in zip(layers, self.scales, strict=bool(self.scales)):
            first *= scale[: first.shape[1]]
            second *= scale[first.shape[1] :]
        return tuple((first, second, bias) for first, second, bias in layers)

    def wide(self, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``first``, ``second`` and ``bias`` of ``layer`` in float32, in which they are multiplied."""
        return self._wide[layer]

    @cached_property
    def cuts(self) -> np.ndarray:
        """The operating thresholds as logits: float32 [layer], -inf where every neuron is predicted."""
        chance = self.thresholds.astype(np.float64)
        with np.errstate(divide="ignore"):
            return (np.log(chance) - np.log1p(-chance)).astype(np.float32)

    def rounded(self) -> Self:
        """The same in 8 bits: each column in steps of 1/127 of its largest magnitude."""
        first, second, scales = [], [], []
        for layer in range(self.spec.layers):
            pair = [_rounded(part) for part in self.wide(layer)[:2]]
            first.append(pair[0][0])
            second.append(pair[1][0])
            scales.append(np.concatenate([scale for _, scale in pair]))
        return replace(self, first=first, second=second, scales=scales)

    def source(self, layer: int) -> int:
        """The layer whose residual predicts ``layer``: ``lookahead`` before it, or the first."""
        return max(0, layer - self.lookahead)

    def logits(self, layer: int, hidden: np.ndarray) -> np.ndarray:
        """Log-odds of activity float32 [tokens, neurons] of ``layer`` from its source's ``hidden`` [tokens, hidden]."""
        first, second, bias = self._wide[layer]
        return normalised(hidden) @ first @ second + bias

    def scores(self, layer: int, hidden: np.ndarray) -> np.ndarray:
        """Probabilities of activity float32 [tokens, neurons] of ``layer``; ``hidden`` as in ``logits``."""
        return 1 / (1 + np.exp(-self.logits(layer, hidden)))

    def predicted(self, layer: int, hidden: np.ndarray) -> np.ndarray:
        """Predicted sets uint64 [tokens, words] of ``layer`` at its threshold; ``hidden`` as in ``logits``."""
        return bits.pack(self.logits(layer, hidden) >= self.cuts[layer])

    def predict(self, trace: Trace) -> np.ndarray:
        """Predicted sets of every token of ``trace``, which has residuals: uint64 [token, layer, words]."""
        self.check_trace(trace)
        hidden = trace.hidden
        assert hidden is not None
        sets = np.empty((len(trace), self.spec.layers, self.spec.words), np.uint64)
        for start in range(0, len(trace), CHUNK):
            rows = hidden[start : start + CHUNK]
            for layer in range(self.spec.layers):
                sets[start : start + CHUNK, layer] = self.predicted(layer, rows[:, self.source(layer)])
        return sets

    def check_trace(self, trace: Trace) -> None:
        """Raise InputError unless ``trace`` is of this predictor's model and holds residuals."""
        self.check_model(trace.spec, trace.meta.get("weights", ""))
        if trace.hidden is None:
            raise InputError("the trace holds no residuals to predict from; record it with --hidden")

    def check_model(self, spec: ModelSpec, weights: str = "") -> None:
        """Raise InputError unless it was trained on this shape, and on these weights where both are known."""
        if spec.fingerprint() != self.spec.fingerprint():
            raise InputError(
                f"predictor is for {self.spec.name} ({self.spec.fingerprint()}), the model is {spec.name} "
                f"({spec.fingerprint()}); train one for this model with `dinfer train-predictor`"
            )
        if self.weights and weights and weights != self.weights:
            raise InputError(
                f"predictor is for other weights of {self.spec.name} ({self.weights}, the model has {weights}); "
                "record these weights and train again"
            )

    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 of everything in it."""
        digest = hashlib.sha256(json.dumps(self._document(), sort_keys=True).encode())
        for array in self._arrays().values():
            digest.update(array.tobytes())
        return digest.hexdigest()[:16]

    def _document(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION if self.bits == 8 else 1,
            "model": self.spec.to_dict(),
            "model_fingerprint": self.spec.fingerprint(),
            "weights": self.weights,
            "trace": self.trace,
            "lookahead": self.lookahead,
            "ranks": list(self.ranks),
            "activity": [float(value) for value in self.activity],
            "quality": dict(self.quality),
            "training": dict(self.training),
        }

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {"thresholds": np.ascontiguousarray(self.thresholds, "<f4")}
        for name in PARTS:
            for layer, array in enumerate(getattr(self, name)):
                arrays[f"{name}.{layer}"] = np.ascontiguousarray(array, "i1" if array.dtype == np.int8 else "<f2")
        for layer, scale in enumerate(self.scales):
            arrays[f"scale.{layer}"] = np.ascontiguousarray(scale, "<f2")
        return dict(sorted(arrays.items()))

    def save(self, path: str | Path) -> None:
        """Write predictor.safetensors and predictor.json into directory ``path``, replacing them when complete."""
        from safetensors.numpy import save_file

        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        mark = self.fingerprint()
        save_file(self._arrays(), path / "predictor.safetensors.new", {"predictor": mark})
        text = json.dumps({**self._document(), "fingerprint": mark}, indent=1) + "\n"
        (path / "predictor.json.new").write_text(text)
        os.replace(path / "predictor.safetensors.new", path / "predictor.safetensors")
        os.replace(path / "predictor.json.new", path / "predictor.json")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The predictor in directory ``path``; raises InputError for one that is none, is newer, or was edited."""
        file = Path(path) / "predictor.json"
        if not file.is_file():
            remedy = "train one with `dinfer train-predictor`"
            raise InputError(f"{path} is no predictor: it lacks predictor.json; {remedy}")
        document = read_document(file, f"predictor {file}", "predictor", VERSION)
        rule = "a predictor is predictor.json and these"
        arrays = read_arrays(Path(path) / "predictor.safetensors", "predictor", rule)
        try:
            spec = ModelSpec.from_dict(document["model"])
            parts: Any = {name: [arrays[f"{name}.{i}"] for i in range(spec.layers)] for name in PARTS}
            read = cls(
                spec=spec,
                scales=[arrays[f"scale.{i}"] for i in range(spec.layers)] if document["version"] > 1 else (),
                thresholds=arrays["thresholds"],
                activity=tuple(document["activity"]),
                **parts,
                **{name: document[name] for name in ("lookahead", "weights", "trace", "quality", "training")},
            )
            written = {**read._document(), "fingerprint": read.fingerprint()}
        except KeyError as error:
            raise InputError(f"predictor {path} lacks {error}; train it again with `dinfer train-predictor`") from None
        except (AttributeError, TypeError, IndexError, ValueError) as error:
            raise InputError(f"predictor {path} has a value of a wrong type ({error}); train it again") from None
        if document | written != document:
            raise InputError(f"predictor {path} and its arrays do not belong together or were edited; train it again")
        return read


def normalised(hidden: np.ndarray) -> np.ndarray:
    """Rows of ``hidden`` [tokens, hidden] over their root mean square, float32: a predictor's input.

    A residual grows from layer to layer and from token to token, and the FFN's own norm divides that out.
    """
    rows = hidden.astype(np.float32)
    return rows / np.sqrt(np.mean(rows * rows, axis=-1, keepdims=True) + np.float32(1e-6))


def _rounded(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A matrix as int8 and the float16 scale of each column; the steps fit the scale as it is stored."""
    largest = np.abs(matrix).max(axis=0, initial=0.0)
    scale = np.maximum(largest / LEVELS, np.finfo(np.float16).tiny).astype(np.float16)
    steps = np.rint(matrix / scale.astype(np.float32))
    return np.clip(steps, -LEVELS, LEVELS).astype(np.int8), scale


def predictor_bytes(spec: ModelSpec, rank: int, bits: int = 16) -> int:
    """Bytes of one layer's predictor of ``rank``: two matrices, a 16-bit bias, and 16-bit scales if it has 8 bits."""
    scales = 2 * (rank + spec.neurons) if bits == 8 else 0
    return bits // 8 * rank * (spec.hidden + spec.neurons) + 2 * spec.neurons + scales


def rank_for_share(spec: ModelSpec, share: float, bits: int = 16) -> int:
    """The largest rank at which all layers' predictors take at most ``share`` of the bytes of the FFNs.

    Raises InputError when that is below 1. The FFNs count in 16 bits, or in fewer if they are stored so.
    """
    whole = spec.neurons * min(spec.neuron_bytes, 2 * spec.matrices * spec.hidden)
    fixed = predictor_bytes(spec, 0, bits)
    rank = int((share * whole - fixed) // (predictor_bytes(spec, 1, bits) - fixed))
    if rank < 1:
        least = predictor_bytes(spec, 1, bits) / whole
        raise InputError(f"share is {share:g} of the FFN's bytes; a predictor of rank 1 takes {least:.4f}, give more")
    return rank
