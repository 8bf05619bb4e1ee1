"""Decoding wholly on the CPU: for plans that hold no neuron on a GPU, one compiled call a token on each thread.

Where nothing waits for a copy or a merge, no step has to come back to Python: on a model of small layers that would
take longer than the layers do.
"""

import queue
import threading
from typing import Any

import numpy as np
import torch

from dinfer.exec.clock import Clock
from dinfer.exec.kernels_cpu import _GROUP, ACTIVATION_CODES, VIEWS, ffn
from dinfer.exec.kernels_token import BARRIERS, Matrices, Rules, Scratch, token
from dinfer.families import Stacked
from dinfer.plan import Plan
from dinfer.timeline import Span


class Host:
    """A model's layers on ``threads`` threads, of which the decoding thread is one.

    ``neurons`` [layer, neuron, matrix, hidden], ``kv`` [layer, 2, kv_heads, context, head_dim] in the weights' dtype,
    ``up_bias`` float32 [layer, neuron] and ``down_bias`` [layer, hidden] or None. The other threads get a token
    through a queue and wait for one another within it by spinning.
    """

    def __init__(
        self,
        plan: Plan,
        stacked: Stacked,
        neurons: torch.Tensor,
        up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        kv: torch.Tensor,
        threads: int,
        clock: Clock,
    ) -> None:
        spec = plan.spec
        self.threads, self.clock, self.kv = threads, clock, _view(kv)
        self.matrices = _matrices(stacked, neurons, spec.dtype, up_bias, down_bias)
        self.rules = _rules(plan, stacked)
        self.scratch = _scratch(plan, threads, self.matrices.qkv.shape[1])
        self.arrivals = 0
        self.everyone = np.tile(np.arange(spec.neurons, dtype=np.int32), spec.layers)
        self.jobs: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(threads - 1)]
        self.helpers = [
            threading.Thread(target=self._help, args=(index + 1,), name=f"cpu{index + 1}", daemon=True)
            for index in range(threads - 1)
        ]
        self._compile_neurons()
        for helper in self.helpers:
            helper.start()
        nobody = np.zeros(0, np.int32)
        self._compute(np.zeros(spec.hidden, np.float32), 0, nobody, np.zeros(spec.layers, np.int64))  # compiles

    def _compile_neurons(self) -> None:
        """Compile the FFN by itself: within ``token``, which counts no references, its small arrays are refused."""
        m, rules, s, nobody = self.matrices, self.rules, self.scratch, slice(0, 0)
        ffn(
            m.neurons[0], s.x[0], self.everyone[nobody], s.parts[0], s.values[nobody], s.active[nobody], m.up_bias[0],
            rules.thresholds[0], rules.activation, rules.predicted, 0.0,
        )  # fmt: skip

    def decode(
        self, hidden: torch.Tensor, position: int, sets: list[np.ndarray] | None
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Logits [vocab] after ``hidden`` [hidden] at ``position``, and how many neurons of each layer were active.

        ``sets`` holds each layer's neurons to compute, int32 ascending; None computes all, told active by their gates.
        """
        if sets is None:
            ids, ends = self.everyone, np.full(len(self.kv), self.matrices.neurons.shape[1], np.int64).cumsum()
        else:
            ids, ends = np.concatenate(sets), np.cumsum([len(each) for each in sets], dtype=np.int64)
        self._compute(hidden.float().numpy(), position, ids, ends)
        found = self.scratch.found.sum(axis=0)
        self._keep_times(found)
        return torch.from_numpy(self.scratch.logits.copy()), found

    def close(self) -> None:
        """End the threads."""
        for jobs in self.jobs:
            jobs.put(None)
        for helper in self.helpers:
            helper.join()

    def _compute(self, hidden: np.ndarray, position: int, ids: np.ndarray, ends: np.ndarray) -> None:
        self.scratch.hidden[:] = hidden
        job = (self.arrivals, self.matrices, self.rules, self.kv, position, ids, ends, self.scratch)
        self.arrivals += (BARRIERS * len(self.kv) + 1) * self.threads
        for jobs in self.jobs:
            jobs.put(job)
        token(0, self.threads, *job)

    def _help(self, index: int) -> None:
        while (job := self.jobs[index - 1].get()) is not None:
            token(index, self.threads, *job)

    def _keep_times(self, found: np.ndarray) -> None:
        """Spans of the steps; ``end_token`` closes the head's."""
        base, at = self.clock.base, self.clock.last
        for layer, (attended, computed) in enumerate(self.scratch.times.tolist()):
            span = (self.clock.token, layer)
            self.clock.spans.append(Span(*span, "attention", "cpu", at - base, attended - base))
            self.clock.spans.append(Span(*span, "ffn_cpu", "cpu", attended - base, computed - base, int(found[layer])))
            at = computed
        self.clock.last = at


def _matrices(
    stacked: Stacked,
    neurons: torch.Tensor,
    dtype: str,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> Matrices:
    layers = neurons.shape[0]

    def biases(given: torch.Tensor | None) -> np.ndarray:
        return np.empty((layers, 0), np.float32) if given is None else given.float().numpy()

    return Matrices(
        qkv=_view(stacked.qkv),
        qkv_bias=stacked.qkv_bias.numpy(),
        o=_view(stacked.o),
        o_bias=stacked.o_bias.numpy(),
        neurons=neurons.view(getattr(torch, VIEWS[dtype])).numpy(),
        up_bias=biases(up_bias),
        down_bias=biases(down_bias),
        head=_view(stacked.head),
        attention_norm=stacked.attention_norm.numpy(),
        ffn_norm=stacked.ffn_norm.numpy(),
        norm=stacked.norm.numpy(),
        cos=stacked.cos.numpy(),
        sin=stacked.sin.numpy(),
    )


def _rules(plan: Plan, stacked: Stacked) -> Rules:
    spec = plan.spec
    relu = spec.sparsity_kind == "relu"
    dense = not relu and not any(plan.thresholds)
    return Rules(
        rms=stacked.rms,
        epsilon=stacked.epsilon,
        activation=ACTIVATION_CODES[spec.activation],
        predicted=dense or plan.activation == "predicted",
        thresholds=plan.value_thresholds,
        windows=np.array(spec.windows or (0,) * spec.layers, np.int64),
    )


def _scratch(plan: Plan, threads: int, rows: int) -> Scratch:
    spec = plan.spec

    def floats(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    return Scratch(
        hidden=floats(threads, spec.hidden),
        x=floats(threads, spec.hidden),
        parts=floats(threads, spec.hidden),
        scores=floats(threads, plan.context),
        turned=floats(threads, spec.head_dim),
        starts=np.zeros((threads, _GROUP), np.int64),
        factors=floats(threads, _GROUP),
        qkv=floats(rows),
        mixed=floats(spec.heads * spec.head_dim),
        o=floats(spec.hidden),
        values=floats(spec.neurons),
        active=np.zeros(spec.neurons, np.bool_),
        found=np.zeros((threads, spec.layers), np.int32),
        logits=floats(spec.vocab),
        times=np.zeros((spec.layers, 2)),
        sync=np.zeros(1, np.int64),
    )


def _view(tensor: torch.Tensor) -> np.ndarray:
    """``tensor`` as the kernels take it (kernels_cpu.VIEWS)."""
    kind = VIEWS[str(tensor.dtype).removeprefix("torch.")]
    whole = tensor.contiguous()
    return (whole if whole.dtype == torch.float32 else whole.view(torch.int16)).numpy().view(kind)
