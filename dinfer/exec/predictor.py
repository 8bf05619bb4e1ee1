"""A trained predictor at work: the sets of a layer from the residual that decoding has at hand."""

import time
from dataclasses import replace

import numpy as np
import torch

from dinfer import bits
from dinfer.model import ModelSpec
from dinfer.predictors import Predictors

RANKS = 8, 128
"""Ranks at which a prediction is timed: what differs is what it reads."""


class LivePredictor:
    """``predictors`` as tensors on ``device``, multiplied in 16 bits on a GPU and in 32 on a CPU, slow at 16.

    They are held as they are multiplied, or 8-bit ones as ``stored`` (default: on a GPU), to be widened layer by layer.
    """

    def __init__(self, predictors: Predictors, device: torch.device, stored: bool | None = None) -> None:
        gpu = device.type == "cuda"
        self.dtype = torch.float16 if gpu else torch.float32
        self.stored = predictors.bits == 8 and (gpu if stored is None else stored)
        self.layers, self.scales = [], []
        for layer, parts in enumerate(zip(predictors.first, predictors.second, predictors.bias, strict=True)):
            held = parts if self.stored else predictors.wide(layer)
            tensors = [torch.from_numpy(np.asarray(part)).to(device) for part in held]
            self.layers.append([t if t.dtype == torch.int8 else t.to(self.dtype) for t in tensors])
            if self.stored:
                scale = torch.from_numpy(predictors.scales[layer]).to(device, self.dtype)
                self.scales.append(scale.split([tensors[0].shape[1], predictors.spec.neurons]))
        self.cuts = predictors.cuts.tolist()

    def predicted(self, layer: int, hidden: torch.Tensor) -> np.ndarray:
        """Words uint64 of the set predicted for ``layer`` from ``hidden`` [sequence, hidden]; of a batch the union."""
        return bits.pack(self.chosen(layer, hidden).any(dim=0).cpu().numpy())

    def chosen(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Who is predicted for ``layer``, bool [row, neuron], from each row of ``hidden`` [row, hidden]."""
        first, second, bias = self.layers[layer]
        if self.stored:
            first, second = first * self.scales[layer][0], second * self.scales[layer][1]
        rows = hidden.float()
        rows = (rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + 1e-6)).to(self.dtype)
        return torch.addmm(bias, rows @ first, second) >= self.cuts[layer]


def measure_predict(spec: ModelSpec, device: torch.device, repeats: int = 40) -> tuple[float, float]:
    """Seconds of one layer's prediction: a fixed part, and more for each rank; medians over random ones of 8 bits."""
    few = replace(spec, layers=min(spec.layers, 8), windows=())
    seconds = []
    for rank in RANKS:
        live = LivePredictor(_random(few, rank), device)
        hidden = torch.randn(1, spec.hidden, device=device)
        taken = []
        for number in range(repeats + 8):  # the first eight warm up
            start = time.perf_counter()
            live.predicted(number % few.layers, hidden)
            taken.append(time.perf_counter() - start)
        seconds.append(float(np.median(taken[8:])))
    each = max(0.0, (seconds[1] - seconds[0]) / (RANKS[1] - RANKS[0]))
    return max(0.0, seconds[0] - RANKS[0] * each), each


def _random(spec: ModelSpec, rank: int) -> Predictors:
    draw = np.random.default_rng(0).standard_normal
    layers = range(spec.layers)
    return Predictors(
        spec=spec,
        lookahead=0,
        first=[draw((spec.hidden, rank)).astype(np.float16) for _ in layers],
        second=[draw((rank, spec.neurons)).astype(np.float16) for _ in layers],
        bias=[draw(spec.neurons).astype(np.float16) for _ in layers],
        thresholds=np.full(spec.layers, 0.5, np.float32),
    ).rounded()
