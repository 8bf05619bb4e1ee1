"""Where a training of predictors starts: the least-squares map of each layer, cut to a width of its own."""

from typing import NamedTuple

import numpy as np
import torch

from dinfer.record.predictor_data import Batch, Data
from dinfer.record.predictor_steps import NAMES, State, Told
from dinfer.trace import decode_levels

WIDTHS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
"""Ranks that are tried for each layer, as multiples of the rank that all layers would have at the same width."""

WIDTH_TOKENS = 1024
"""About so many validation tokens set the widths."""


def start(data: Data, rank: int, told: Told) -> State:
    """One pass: the least-squares map of each layer, cut to the width that its measured recall asks for."""
    sums = [Sums(data.spec.hidden, data.spec.neurons) for _ in range(data.spec.layers)]
    power = np.zeros((data.spec.layers, 256))
    for rows in data.batches(0):
        batch = data.read(rows)

        def add(layer: int, batch: Batch = batch) -> None:
            active = batch.active(layer)
            sums[layer].add(batch.inputs(layer), active)
            power[layer] += np.bincount(batch.codes[:, layer][active.numpy() > 0], minlength=256)

        data.each_layer(add)
        told.step()
    data.weights = _loss_weights(power, np.array([s.rate.mean().item() for s in sums]), data.settings.contribution)
    maps = data.each_layer(lambda layer: sums[layer].solve())
    ranks = _widths(data, maps, sums, rank)
    values = []
    for map_, sum_, width in zip(maps, sums, ranks, strict=True):
        first, second = map_.cut(width)
        chance = sum_.rate.clamp(1e-3, 1 - 1e-3)
        spread = (chance * (1 - chance)).clamp(min=0.02)  # of a label: the slope of its log-odds
        values.append({"first": first, "second": second / spread, "bias": torch.logit(chance)})
    zeros = [{f"{n}.{m}": torch.zeros_like(v[n]) for n in NAMES for m in ("mean", "square")} for v in values]
    return State(
        values=values,
        best=[{n: t.clone() for n, t in v.items()} for v in values],
        moments=zeros,
        mean=torch.stack([s.mean for s in sums]),
        scale=torch.stack([s.scale for s in sums]),
        losses=torch.tensor([[float("inf"), 0.0]] * data.spec.layers, dtype=torch.float64),
        weights=torch.from_numpy(data.weights),
        counters=torch.zeros(1, dtype=torch.int64),
    )


def _loss_weights(power: np.ndarray, density: np.ndarray, follow: float) -> np.ndarray:
    """Weight of an active neuron by its contribution's code, of an inactive one (1) at code 0: float32 [layer, 256].

    The class's weight (1 - density) / density, and of it the share ``follow`` in proportion to the contribution, at
    most ten times the mean: what is missed should be what matters little.
    """
    levels = decode_levels(np.arange(256), 1.0).astype(np.float64)
    mean = (power @ levels) / np.maximum(power.sum(axis=1), 1)
    relative = np.minimum(levels / np.maximum(mean, 1e-30)[:, None], 10.0)
    class_weight = ((1 - density) / np.maximum(density, 1e-3))[:, None]
    weights = class_weight * (1 - follow + follow * relative)
    weights[:, 0] = 1
    return weights.astype(np.float32)


class Sums:
    """Streamed sums of one layer: of inputs, of labels and of their products."""

    def __init__(self, hidden: int, neurons: int) -> None:
        self.inputs, self.labels = torch.zeros(hidden, dtype=torch.float64), torch.zeros(neurons, dtype=torch.float64)
        self.square, self.product = torch.zeros(hidden, hidden), torch.zeros(hidden, neurons)
        self.count = 0

    def add(self, x: torch.Tensor, active: torch.Tensor) -> None:
        """Add a batch."""
        self.inputs += x.sum(dim=0)
        self.labels += active.sum(dim=0)
        self.square += x.T @ x
        self.product += x.T @ active
        self.count += len(x)

    @property
    def rate(self) -> torch.Tensor:
        """How often each neuron is active: float32 [neurons]."""
        return (self.labels / self.count).float()

    @property
    def mean(self) -> torch.Tensor:
        """Mean input: float32 [hidden]."""
        return (self.inputs / self.count).float()

    @property
    def scale(self) -> torch.Tensor:
        """Standard deviation of the input: float32 [hidden]."""
        variance = self.square.diagonal().double() / self.count - (self.inputs / self.count) ** 2
        return variance.clamp(min=1e-8).sqrt().float()

    def solve(self) -> "Map":
        """The least-squares map of standardised inputs onto centred labels, in the directions that matter."""
        mean, scale = self.mean.double(), self.scale.double()
        moment = (self.square.double() / self.count - mean[:, None] * mean) / (scale[:, None] * scale)
        product = (self.product.double() / self.count - mean[:, None] * self.rate.double()) / scale[:, None]
        ridge = 1e-3 * torch.eye(len(mean), dtype=torch.float64)
        root = torch.linalg.cholesky(moment + ridge)
        white = torch.linalg.solve_triangular(root, product, upper=False)  # the map of whitened inputs
        # its left singular vectors from the small square matrix: the inputs are fewer than the neurons
        values, left = torch.linalg.eigh(white @ white.T)
        left = left.flip(1)
        first = torch.linalg.solve_triangular(root.T, left, upper=True)
        return Map(first.float(), (left.T @ white).float())


class Map(NamedTuple):
    """A map in the order of what each direction explains: ``first`` [hidden, hidden], ``second`` [hidden, neurons]."""

    first: torch.Tensor
    second: torch.Tensor

    def cut(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Its best approximation of ``rank``."""
        return self.first[:, :rank].clone(), self.second[:rank].clone()


def _widths(data: Data, maps: list[Map], sums: list[Sums], rank: int) -> list[int]:
    """Rank of each layer under the bytes of ``rank`` for all: where another step raises measured recall most."""
    tried = sorted({min(max(1, round(w * rank)), data.spec.hidden, data.spec.neurons) for w in WIDTHS})
    batch = data.read(data.validation[:: max(1, len(data.validation) // WIDTH_TOKENS)])

    def recalls(layer: int) -> list[float]:
        map_, sum_ = maps[layer], sums[layer]
        x = (batch.inputs(layer) - sum_.mean) / sum_.scale
        active = batch.active(layer) > 0
        said, done, found = sum_.rate.expand(active.shape).clone(), 0, []
        for width in tried:
            said += x @ map_.first[:, done:width] @ map_.second[done:width]
            found.append(_matched_recall(said, active))
            done = width
        return found

    recall = np.array(data.each_layer(recalls))
    return [tried[i] for i in spend(recall, np.array(tried), rank * data.spec.layers)]


def _matched_recall(said: torch.Tensor, active: torch.Tensor) -> float:
    """Recall where as many neurons are predicted as are active."""
    count = int(active.sum())
    if not count:
        return 1.0
    limit = said.flatten().kthvalue(said.numel() - count + 1).values
    return float((active & (said >= limit)).sum()) / count


def spend(recall: np.ndarray, ranks: np.ndarray, budget: int) -> list[int]:
    """Index into ``ranks`` for each layer, the sum of ranks at most ``budget``, by recall [layer, rank] won a rank.

    Greedy: the layer whose next step (or several at once) wins most recall a rank takes it while the budget lasts.
    """
    chosen = [0] * len(recall)
    left = budget - len(recall) * int(ranks[0])
    while True:
        best: tuple[float, int, int] | None = None
        for layer, at in enumerate(chosen):
            for to in range(at + 1, len(ranks)):
                cost = int(ranks[to] - ranks[at])
                gain = (recall[layer, to] - recall[layer, at]) / cost
                if cost <= left and gain > 0 and (best is None or gain > best[0]):
                    best = gain, layer, to
        if best is None:
            return chosen
        _, layer, to = best
        left -= int(ranks[to] - ranks[chosen[layer]])
        chosen[layer] = to
