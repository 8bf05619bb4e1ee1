"""What the machine takes now: a running estimate of the believed costs, from the run's own spans."""

import numpy as np

from dinfer.machine import Factors, LayerCosts
from dinfer.timeline import Span

MEMORY_TOKENS = 8
"""Tokens over which measured seconds are averaged, exponentially. Ours."""

COLD_TOKENS = 1
"""The first tokens find cold caches and are not measured."""

MEASURED = {("attention", "gpu"): 0, ("ffn_gpu", "gpu"): 1, ("ffn_cpu", "cpu"): 2, ("prefetch", "h2d"): 3}
"""Place in Factors of the spans that are measured, by step and stream."""


class Estimate:
    """Factors on a plan's costs: measured over planned seconds, both as exponentially fading sums over tokens.

    ``believed`` [token, attention, gpu, cpu, link] has what held from each token on; before its first row the plan's
    costs hold.
    """

    def __init__(self, costs: LayerCosts) -> None:
        self.costs = costs
        self.believed: list[list[float]] = []
        self.tokens = self.seen = 0
        self.measured, self.planned = np.zeros(4), np.zeros(4)

    def update(self, spans: list[Span], planned: Factors) -> Factors:
        """A token has ended: ``spans`` are all of the run so far, ``planned`` the seconds that it should have taken.

        Of the link a span's neurons tell what it should have taken.
        """
        measured, expected = [0.0] * 4, [*planned[:3], 0.0]
        new, self.seen = spans[self.seen :], len(spans)
        for span in new:
            place = MEASURED.get((span.step, span.stream))
            if place is None or place == 3 and not span.bytes:
                continue
            measured[place] += span.end_seconds - span.start_seconds
            if place == 3:
                seconds = self.costs.prefetch_fixed_seconds + span.neurons * self.costs.prefetch_neuron_seconds
                expected[3] += seconds
        self.tokens += 1
        if self.tokens > COLD_TOKENS:
            fading = 1 - 1 / MEMORY_TOKENS
            self.measured = fading * self.measured + measured
            self.planned = fading * self.planned + expected
        known = (self.planned > 0) & (self.measured > 0)
        factors = np.divide(self.measured, self.planned, out=np.ones(4), where=known)
        self.believed.append([self.tokens, *factors.tolist()])
        return Factors(*factors.tolist())
