"""The prompt: all of its tokens through the model at once, the FFNs dense on the host, where all neurons lie."""

import time
from collections.abc import Sequence

import torch

from dinfer.exec import kernels_gpu
from dinfer.exec.decode import Running
from dinfer.machine import PREFILL_CHUNK


def timed_prefill(run: Running, sequence: int, ids: Sequence[int], start: int = 0) -> torch.Tensor:
    """``prefill``, its tokens and seconds kept in ``run.prefills``."""
    begun = time.perf_counter()
    logits = prefill(run, sequence, ids, start)
    if run.device.type == "cuda":
        torch.cuda.synchronize()
    run.prefills.append([len(ids), time.perf_counter() - begun])
    return logits


def prefill(run: Running, sequence: int, ids: Sequence[int], start: int = 0) -> torch.Tensor:
    """Logits [vocab] after ``ids``, which stand in ``sequence`` at positions from ``start``."""
    spec, family = run.plan.spec, run.family
    logits = torch.empty(0)
    for first in range(0, len(ids), PREFILL_CHUNK):
        chunk = torch.tensor(ids[first : first + PREFILL_CHUNK], device=run.device)
        position = [start + first]
        hidden = family.embed(run.dense, chunk, position)
        for layer in range(spec.layers):
            hidden = family.attention(run.dense, layer, hidden, [run.kv[layer][sequence]], position)
            x = family.ffn_input(run.dense, layer, hidden).to(run.bank.host.device)
            bias = None if run.bank.up_bias is None else run.bank.up_bias[layer].to(x.dtype)
            total, _ = kernels_gpu.ffn(run.bank.host[layer], x, spec, bias, float(run.value_thresholds[layer]))
            hidden = hidden + total.to(hidden.device)
            if run.bank.down_bias is not None:
                hidden = hidden + run.bank.down_bias[layer]
        logits = family.head(run.dense, hidden[-1:])[0]
    return logits
