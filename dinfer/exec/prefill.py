"""The prompt: all of its tokens through the model at once, the FFNs dense.

Who computes them is what the machine's costs say is faster: the CPU, where all neurons lie, or the GPU, to which the
neurons that are not resident are streamed.
"""

import time
from collections.abc import Sequence

import torch

from dinfer.exec import kernels_gpu
from dinfer.exec.decode import Running
from dinfer.machine import PREFILL_CHUNK, prefill_block, prefill_choices


def timed_prefill(
    run: Running, sequence: int, ids: Sequence[int], start: int = 0, way: str | None = None
) -> torch.Tensor:
    """``prefill`` by ``way``, one of PREFILLS (None: the faster by the costs); its tokens, seconds and way are kept."""
    begun, threads = time.perf_counter(), torch.get_num_threads()
    if run.host is not None:  # no GPU to stream to; its threads stand still meanwhile
        way = "cpu"
        torch.set_num_threads(run.host.threads)
    way = way or faster_way(run, len(ids))
    logits = prefill(run, sequence, ids, start, way)
    torch.set_num_threads(threads)
    if run.device.type == "cuda":
        torch.cuda.synchronize()
    run.prefills.append([len(ids), time.perf_counter() - begun])
    run.ways.append(way)
    return logits


def faster_way(run: Running, tokens: int) -> str:
    """The one of PREFILLS that the plan's machine does sooner."""
    resident = int(run.plan.placement.slots.sum())
    choices = prefill_choices(run.plan.spec, run.plan.machine, tokens, resident)
    return min(choices, key=lambda way: choices[way])


def prefill(run: Running, sequence: int, ids: Sequence[int], start: int = 0, way: str = "cpu") -> torch.Tensor:
    """Logits [vocab] after ``ids``, which stand in ``sequence`` at positions from ``start``."""
    family, hidden = run.family, torch.empty(0)
    ffn = Streamed(run) if way == "stream" else OnHost(run)
    for first in range(0, len(ids), PREFILL_CHUNK):
        chunk = torch.tensor(ids[first : first + PREFILL_CHUNK], device=run.device)
        position = [start + first]
        hidden = family.embed(run.dense, chunk, position)
        for layer in range(run.plan.spec.layers):
            hidden = family.attention(run.dense, layer, hidden, [run.kv[layer][sequence]], position)
            hidden = hidden + ffn(layer, family.ffn_input(run.dense, layer, hidden))
            if run.bank.down_bias is not None:
                hidden = hidden + run.bank.down_bias[layer]
    return family.head(run.dense, hidden[-1:])[0]


class OnHost:
    """The FFNs on the CPU."""

    def __init__(self, run: Running) -> None:
        self.run = run

    def __call__(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The FFN's output [tokens, hidden] of ``x`` [tokens, hidden], both on the device."""
        run, bank = self.run, self.run.bank
        here = x.to(bank.host.device)
        bias = None if bank.up_bias is None else bank.up_bias[layer].to(x.dtype)
        total, _ = kernels_gpu.ffn(bank.host[layer], here, run.plan.spec, bias, float(run.value_thresholds[layer]))
        return total.to(x.device)


class Streamed:
    """The FFNs on the GPU: the resident neurons where they are, the others a block at a time, the next on its way."""

    def __init__(self, run: Running) -> None:
        self.run, self.block = run, prefill_block(run.plan.spec)
        host = run.bank.host
        self.buffers = torch.empty((2, self.block, *host.shape[2:]), dtype=host.dtype, device=run.device)

    def __call__(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The FFN's output [tokens, hidden] of ``x`` [tokens, hidden], both on the device."""
        run, bank, total = self.run, self.run.bank, torch.zeros_like(x)
        threshold = float(run.value_thresholds[layer])
        if len(bank.bucket[layer]):
            bias = None if bank.slot_bias is None else bank.slot_bias[layer]
            total = kernels_gpu.ffn(bank.slots[layer], x, run.plan.spec, bias, threshold)[0]
        cold = bank.cold[layer]
        blocks = [cold[first : first + self.block] for first in range(0, len(cold), self.block)]
        coming = run.link.bring(layer, blocks[0], self.buffers[0]) if blocks else None
        for number, ids in enumerate(blocks):
            here, rows = coming, self.buffers[number % 2][: len(ids)]
            if number + 1 < len(blocks):
                coming = run.link.bring(layer, blocks[number + 1], self.buffers[(number + 1) % 2])
            run.link.wait(here)
            bias = None
            if bank.device_bias is not None:
                bias = bank.device_bias[layer][torch.from_numpy(ids).to(x.device, torch.int64)]
            total = total + kernels_gpu.ffn(rows, x, run.plan.spec, bias, threshold)[0]
        return total
