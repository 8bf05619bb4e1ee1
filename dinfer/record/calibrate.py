"""Activity thresholds for a wanted sparsity, and what they cost: FFN output error and perplexity."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.activations import ACT2FN

from dinfer.errors import InputError
from dinfer.families import ffn_sites
from dinfer.model import ModelSpec
from dinfer.record.allocate import STEPS, allocate, curves, sensitivities
from dinfer.record.generate import Loaded, Sampling, generate, listening, thresholded

HEADROOM = 2.0
"""Code 255 of score and contribution stands for this multiple of the calibration's largest value."""

DEFAULT_SAMPLING = Sampling()

ALLOCATIONS = ("uniform", "greedy")

HISTOGRAM_SHIFT = 14
"""Float bits dropped in the histogram of magnitudes: 17 stay, a relative step of 2**-9."""


@dataclass(frozen=True)
class Calibration:
    """Thresholds and scales [layers] of one model, and what the thresholds cost on text that did not set them.

    ``thresholds``, ``score_scale``, ``contribution_scale``, ``gate_scale``: float32. ``sparsity`` and
    ``output_error`` (the relative error of the FFN's output, mean over tokens) are per layer. ``tokens`` were heard,
    ``held_out`` says whether the costs come from other prompts than the thresholds. Of ReLU kinds at their
    own threshold the costs are 0: nothing active is dropped.
    """

    thresholds: np.ndarray
    score_scale: np.ndarray
    contribution_scale: np.ndarray
    gate_scale: np.ndarray
    sparsity: np.ndarray
    output_error: np.ndarray
    perplexity_dense: float
    perplexity_sparse: float
    tokens: int
    held_out: bool

    def costs(self) -> dict[str, Any]:
        """Plain values for a trace's meta."""
        return {
            "sparsity": float(self.sparsity.mean()),
            "layer_sparsity": [round(float(share), 4) for share in self.sparsity],
            "output_error": [round(float(error), 4) for error in self.output_error],
            "perplexity_dense": self.perplexity_dense,
            "perplexity_sparse": self.perplexity_sparse,
            "tokens": self.tokens,
            "held_out": self.held_out,
        }


def calibrate(
    loaded: Loaded,
    prompts: list[list[int]],
    *,
    sparsity: float | None = None,
    thresholds: Any = None,
    allocation: str = "uniform",
    max_new_tokens: int = 64,
    sampling: Sampling = DEFAULT_SAMPLING,
) -> Calibration:
    """Thresholds for ``sparsity`` (or the given ones), scales and costs, from dense runs on ``prompts``.

    ``allocation`` is one of ALLOCATIONS: the same sparsity in each layer (of ReLU kinds, which were trained with one
    threshold for all layers, the same threshold), or ``sparsity`` in the mean, shared out greedily under one model-wide
    error (record/allocate.py).
    Every second prompt sets the thresholds, the others measure sparsity, output error and perplexity; a single
    prompt does both. Those of a ReLU kind raise its own, where the wanted sparsity is above it. Raises InputError when
    a magnitude kind has neither or when a ReLU kind's are below its own.
    """
    given = checked_thresholds(loaded, sparsity, thresholds)
    first, second = prompts[::2], prompts[1::2] or prompts
    magnitudes = _Magnitudes(loaded)
    heard = _texts(loaded, magnitudes, first, max_new_tokens, sampling, 0)
    count = sum(map(len, heard))
    if given is None:
        assert sparsity is not None
        own = np.float32(loaded.spec.gate_threshold)
        given = own + magnitudes.quantile(sparsity, together=loaded.spec.sparsity_kind == "relu")
        if allocation == "greedy":
            given = own + _shared_out(loaded, magnitudes, heard, given, sparsity)
    errors = _Errors(loaded, given)
    texts = _texts(loaded, errors, second, max_new_tokens, sampling, len(first))
    dense = perplexity(loaded, texts)
    sparse = dense
    if loaded.spec.sparsity_kind == "magnitude" or loaded.spec.raised(given):
        with thresholded(loaded, given):
            sparse = perplexity(loaded, texts)
    return Calibration(
        thresholds=given,
        score_scale=HEADROOM * magnitudes.score,
        contribution_scale=HEADROOM * magnitudes.contribution,
        gate_scale=HEADROOM * magnitudes.gate,
        sparsity=errors.inactive / errors.heard / loaded.spec.neurons,
        output_error=errors.error / errors.heard,
        perplexity_dense=dense,
        perplexity_sparse=sparse,
        tokens=count + sum(map(len, texts)),
        held_out=len(prompts) > 1,
    )


def _shared_out(
    loaded: Loaded, magnitudes: "_Magnitudes", texts: list[list[int]], uniform: np.ndarray, sparsity: float
) -> np.ndarray:
    """Thresholds float32 [layers] of ``sparsity`` in the mean; sensitivities are measured at the ``uniform`` ones."""
    edges, errors = curves(magnitudes.bins, magnitudes.errors, sum(map(len, texts)))
    at = errors[:, round(sparsity * STEPS)]
    parts = allocate(errors, sensitivities(loaded, texts, uniform, at), sparsity)
    return _Magnitudes.edge(np.take_along_axis(edges, parts[:, None], axis=1)[:, 0])


def checked_thresholds(loaded: Loaded, sparsity: float | None, thresholds: Any) -> np.ndarray | None:
    """float32 [layers] thresholds that are known before any run, None when ``sparsity`` shall set them.

    Raises InputError for a value that breaks a rule, before anything has been run.
    """
    spec = loaded.spec
    name = f"{spec.name} ({spec.activation})"
    relu = spec.sparsity_kind == "relu"
    if relu and sparsity is None and thresholds is None:
        return np.full(spec.layers, spec.gate_threshold, np.float32)
    if thresholds is not None:
        values = np.asarray(thresholds, np.float32)
        if values.shape != (spec.layers,) or not (values >= 0).all():
            raise InputError(
                f"{name}: thresholds has shape {values.shape}; it must be {spec.layers} numbers "
                "of at least 0, one a layer"
            )
        if relu and values.min() < np.float32(spec.gate_threshold):
            raise InputError(
                f"{name}: thresholds has {values.min():g}, but its gates are 0 up to {spec.gate_threshold:g}; it can "
                "be raised only: give at least that, or leave it out"
            )
        return values
    if sparsity is None:
        raise InputError(
            f"{name}: sparsity is None, but its neurons are never exactly 0 and need a magnitude "
            "threshold; give --sparsity (0.6, say) or thresholds"
        )
    if not 0 < sparsity < 1:
        raise InputError(f"{name}: sparsity is {sparsity:g}; it must lie between 0 and 1")
    return None


def activated(gate: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """|act(gate)| in float32, of magnitude kinds."""
    return ACT2FN["silu" if spec.activation == "silu" else "gelu_pytorch_tanh"](gate.float()).abs()


def down_norms(loaded: Loaded) -> list[torch.Tensor]:
    """Euclidean norm of each neuron's down column: float32 [neurons] a layer."""
    return [weight.float().norm(dim=0) for weight in _down_weights(loaded)]


def _down_weights(loaded: Loaded) -> list[torch.Tensor]:
    return [site.down.get_parameter("weight") for site in ffn_sites(loaded.model, loaded.spec)]


@torch.inference_mode()
def perplexity(loaded: Loaded, texts: list[list[int]]) -> float:
    """exp of the mean negative log likelihood of the tokens after the prefix that all ``texts`` share."""
    shared = len(os.path.commonprefix(texts)) if len(texts) > 1 else 0
    total, count = 0.0, 0
    for text in texts:
        skip = max(1, min(shared, len(text) - 1))
        ids = torch.tensor([text], device=loaded.device)
        logits = loaded.model(input_ids=ids, use_cache=False).logits[0, skip - 1 : -1].float()
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, skip:], reduction="sum"))
        count += len(text) - skip
    return float(np.exp(total / max(count, 1)))


def _texts(
    loaded: Loaded, sink: Any, prompts: list[list[int]], tokens: int, sampling: Sampling, first: int
) -> list[list[int]]:
    """Each prompt with what the dense model wrote after it, while ``sink`` hears the activations."""
    texts = [[] for _ in prompts]  # type: list[list[int]]
    with listening(loaded, sink) as listener:
        for step in generate(loaded, listener, prompts, tokens, sampling, first):
            for sequence, ids in zip(step.sequences, step.ids, strict=True):
                texts[sequence] += ids
    return texts


class _Magnitudes:
    """Sink: per layer histograms of scores (counts and squared contributions), and the largest of each level.

    A score is |value|, of ReLU kinds how far the gate is above the model's own threshold.
    """

    def __init__(self, loaded: Loaded) -> None:
        self.spec, self.norms = loaded.spec, down_norms(loaded)
        self.bins = np.zeros((self.spec.layers, 2 ** (31 - HISTOGRAM_SHIFT)), np.int64)
        self.errors = np.zeros(self.bins.shape)
        self.score = np.full(self.spec.layers, np.finfo(np.float32).tiny, np.float32)
        self.contribution, self.gate = self.score.copy(), self.score.copy()

    def __call__(self, layer: int, hidden: torch.Tensor, gate: torch.Tensor, value: torch.Tensor) -> None:
        magnitude = value.float().abs()
        relu = self.spec.sparsity_kind == "relu"
        score = (gate.float() - self.spec.gate_threshold).clamp(min=0) if relu else magnitude
        self.score[layer] = max(self.score[layer], float(score.max()))
        contribution = magnitude * self.norms[layer]
        self.contribution[layer] = max(self.contribution[layer], float(contribution.max()))
        if not relu:
            self.gate[layer] = max(self.gate[layer], float(activated(gate, self.spec).max()))
        codes = (score.cpu().numpy().view(np.uint32) >> HISTOGRAM_SHIFT).ravel()
        self.bins[layer] += np.bincount(codes, minlength=self.bins.shape[1])
        self.errors[layer] += np.bincount(codes, contribution.square().cpu().numpy().ravel(), self.bins.shape[1])

    def quantile(self, share: float, together: bool = False) -> np.ndarray:
        """float32 [layers]: scores below which ``share`` of each layer's neurons lie, to a step of 2**-9.

        ``together`` gives all layers the one below which that share of all neurons lies.
        """
        bins = np.broadcast_to(self.bins.sum(axis=0), self.bins.shape) if together else self.bins
        below = np.cumsum(bins, axis=1)
        return self.edge(np.argmax(below >= share * below[:, -1:], axis=1))

    @staticmethod
    def edge(bins: np.ndarray) -> np.ndarray:
        """float32: the magnitudes at which ``bins`` end."""
        return ((bins + 1).astype(np.uint32) << HISTOGRAM_SHIFT).view(np.float32)


class _Errors:
    """Sink: per layer how many values the thresholds drop, and the relative output error of that."""

    def __init__(self, loaded: Loaded, thresholds: np.ndarray) -> None:
        self.spec, self.thresholds = loaded.spec, thresholds
        self.weights = _down_weights(loaded)
        self.inactive = np.zeros(self.spec.layers)
        self.error = np.zeros(self.spec.layers)
        self.heard = np.zeros(self.spec.layers)

    def __call__(self, layer: int, hidden: torch.Tensor, gate: torch.Tensor, value: torch.Tensor) -> None:
        self.heard[layer] += len(value)
        relu = self.spec.sparsity_kind == "relu"
        dropped = (gate if relu else value.abs()) <= float(self.thresholds[layer])
        self.inactive[layer] += int(dropped.sum())
        whole = torch.nn.functional.linear(value, self.weights[layer]).norm(dim=1)
        lost = torch.nn.functional.linear(value * dropped, self.weights[layer]).norm(dim=1)
        self.error[layer] += float((lost / whole.clamp(min=1e-30)).sum())
