"""The CPU's part of an FFN on threads of its own; the compiled kernel holds no GIL."""

import queue
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from dinfer.exec.bank import Bank
from dinfer.exec.clock import Clock
from dinfer.exec.kernels_cpu import VIEWS, ffn_cpu
from dinfer.exec.link import Arrival
from dinfer.plan import Plan

CHUNK_BYTES = 2**20
"""Of a batch, neurons of about this many bytes are computed for one sequence after the other: they stay in a cache."""


class Partial(NamedTuple):
    """The CPU's answer: partial sums float32 [sequence, hidden], the ids computed, values float32 [sequence, ids]."""

    total: np.ndarray
    ids: np.ndarray
    values: np.ndarray


class Workers:
    """``threads`` threads that compute one layer's cold neurons together; the first also adds the parts up.

    Plain threads and no numba thread pool: torch has its own pool, and the two would fight for the cores.
    """

    def __init__(self, plan: Plan, bank: Bank, threads: int, clock: Clock) -> None:
        self.spec, self.clock, self.predicted = plan.spec, clock, plan.activation == "predicted"
        spec = plan.spec
        view = getattr(torch, VIEWS[spec.dtype])
        self.rows = [layer.view(view).numpy() for layer in bank.host]
        self.biases = None if bank.up_bias is None else bank.up_bias.numpy()
        self.thresholds = plan.value_thresholds.tolist()
        self.gate_thresholds = [0.0] * spec.layers
        self.jobs: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(threads)]
        self.parts: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self._work, args=(index,), name=f"cpu{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self.threads:
            thread.start()
        self.chunk = max(1, CHUNK_BYTES // spec.neuron_bytes)
        nothing = np.zeros((1, spec.hidden), np.float32)
        self.start(0, lambda: nothing, np.zeros(0, np.int32))  # compiles before the clock runs
        self.result()
        clock.spans.clear()

    def start(self, layer: int, x: Arrival, ids: np.ndarray) -> None:
        """Begin the layer's cold neurons ``ids`` int32 once their input float32 [sequence, hidden] has arrived."""
        asked = time.perf_counter()
        parts = len(self.jobs)
        for index, jobs in enumerate(self.jobs):
            jobs.put((layer, x, ids[index * len(ids) // parts : (index + 1) * len(ids) // parts], asked))

    def result(self) -> Partial:
        """Wait for what ``start`` began; an error of a worker is raised here."""
        answer = self.answer.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        """End the threads."""
        for jobs in self.jobs:
            jobs.put(None)
        for thread in self.threads:
            thread.join()

    def _work(self, index: int) -> None:
        while (job := self.jobs[index].get()) is not None:
            try:
                part = self._compute(index == 0, *job)
                if index:
                    self.parts.put(part)
                    continue
                parts = [part, *(self.parts.get() for _ in self.jobs[1:])]
                self.answer.put(_join(parts))
            except BaseException as error:  # noqa: BLE001 - the decoding thread raises it
                (self.parts if index else self.answer).put(error)

    def _compute(self, first: bool, layer: int, arrive: Arrival, ids: np.ndarray, asked: float) -> Partial:
        x = arrive()
        start = time.perf_counter()
        if first:
            self.clock.record(layer, "ffn_cpu", "d2h", asked, start)
        total, values = torch.zeros(x.shape).numpy(), np.empty((len(x), len(ids)), np.float32)
        bias = None if self.biases is None else self.biases[layer]
        chunk = len(ids) if len(x) == 1 else self.chunk  # of a batch, each chunk is read from DRAM once for all
        active = 0
        for begin in range(0, max(len(ids), 1), max(chunk, 1)):
            part = slice(begin, begin + chunk)
            for sequence in range(len(x)):
                active += ffn_cpu(
                    self.spec, self.rows[layer], x[sequence], ids[part], total[sequence], values[sequence, part],
                    self.thresholds[layer], bias, predicted=self.predicted, gate_threshold=self.gate_thresholds[layer],
                )  # fmt: skip
        end = time.perf_counter()
        if first:
            if len(x) > 1:
                active = int(np.count_nonzero(values.any(axis=0)))
            self.clock.record(layer, "ffn_cpu", "cpu", start, end, active)
        return Partial(total, ids, values)


def _join(parts: list[Any]) -> Any:
    for part in parts:
        if isinstance(part, BaseException):
            return part
    if len(parts) == 1:
        return parts[0]
    ordered = sorted(parts, key=lambda part: part.ids[0] if len(part.ids) else -1)
    return Partial(
        np.sum([part.total for part in ordered], axis=0),
        np.concatenate([part.ids for part in ordered]),
        np.concatenate([part.values for part in ordered], axis=1),
    )
