"""A token's dense part and the FFN of its slots as CUDA graphs: one launch each where torch would make a dozen.

No shape and no pointer depends on the token: its position is a tensor, its vectors have fixed places, and attention
reads the cache up to a length that holds for many positions, with a mask.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch

from dinfer.exec.bank import Bank
from dinfer.exec.kernels_gpu import Ffn
from dinfer.plan import Plan

SHORTEST = 128
"""Positions of the cache that the shortest graph of a layer's attention reads; the next reads twice as many."""


class Graphs:
    """For each layer one graph for each cache length of attention and the FFN's norm, and one of the FFN of all slots.

    ``caches[layer]`` is [2, kv_heads, context, head_dim]. On a CPU device the same functions run as they are.
    """

    def __init__(
        self, plan: Plan, family: ModuleType, dense: Any, caches: Sequence[torch.Tensor], bank: Bank, kernel: Ffn
    ) -> None:
        self.plan, self.family, self.dense, self.caches = plan, family, dense, caches
        self.bank, self.kernel = bank, kernel
        device, dtype = caches[0].device, caches[0].dtype
        self.hidden, self.x = torch.zeros((2, 1, plan.spec.hidden), dtype=dtype, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.pool: Any = None
        self.lengths = lengths(plan.context)
        layers = range(plan.spec.layers)
        self.attentions = [[self._ready(partial(self._attend, i, length)) for length in self.lengths] for i in layers]
        self.ffns = {i: self._ready(partial(self._ffn, i)) for i in layers if len(bank.bucket[i])}

    def start(self, position: int) -> None:
        """What follows is the token at ``position``."""
        self.position.fill_(position)
        self.shelf = bisect_left(self.lengths, position + 1)

    def attention(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The un-normalised residual and the FFN's input, [1, hidden] each, until the next layer's."""
        self.hidden.copy_(hidden)
        self.attentions[layer][self.shelf]()
        return self.hidden, self.x

    def ffn(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Partial sum [1, hidden] and values [1, slot] of all slots, until the next token's."""
        return self.ffns[layer]()

    def _attend(self, layer: int, length: int) -> None:
        hidden = self.family.attention_at(
            self.dense, layer, self.hidden, self.caches[layer], self.position, length
        )
        self.x.copy_(self.family.ffn_input(self.dense, layer, hidden))
        self.hidden.copy_(hidden)

    def _ffn(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        bias = None if self.bank.slot_bias is None else self.bank.slot_bias[layer]
        threshold = float(self.plan.value_thresholds[layer])
        return self.kernel(self.bank.slots[layer], self.x, self.plan.spec, bias, threshold)

    def _ready(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """``function`` captured, after a first call that sets up what may not be captured."""
        if self.x.device.type != "cuda":
            return function
        aside = torch.cuda.Stream(self.x.device)
        aside.wait_stream(torch.cuda.current_stream(self.x.device))
        with torch.cuda.stream(aside):
            function()
        torch.cuda.current_stream(self.x.device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            made = function()
        self.pool = graph.pool()  # the graphs run one after the other and may share what they use in between

        def replay() -> Any:
            graph.replay()
            return made

        return replay


def lengths(context: int) -> list[int]:
    """Cache lengths that graphs read: doubling from SHORTEST, the last is the whole ``context``."""
    found = [min(SHORTEST, context)]
    while found[-1] < context:
        found.append(min(2 * found[-1], context))
    return found
