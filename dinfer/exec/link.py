"""The host-to-device link: real copies on their own CUDA stream, or an emulated link at a given rate."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from dinfer.errors import InputError
from dinfer.exec.bank import Bank
from dinfer.exec.kernels_cpu import copy_rows
from dinfer.machine import Link

Record = Callable[[int, str, str, float, float, int, int], None]
"""record(layer, step, stream, start, end, neurons, bytes) with perf_counter seconds."""


class Transport(Protocol):
    """Moves neurons into slots, in order."""

    def prefetch(self, layer: int, ids: np.ndarray, slots: np.ndarray) -> Any:
        """Start moving neurons ``ids`` into ``slots`` of a layer; returns what ``wait`` takes."""

    def wait(self, token: Any) -> None:
        """Let what follows on the compute stream see the moved neurons."""

    def close(self) -> None:
        """Finish what was started."""


class EmulatedLink:
    """A link of a given rate to a torch CPU device: a thread copies, then sleeps until the link would be done.

    In order; each copy starts when the one before has ended by the emulated clock, so that an overslept wake-up does
    not slow the link down.
    """

    def __init__(self, bank: Bank, link: Link, per_neuron: bool, record: Record) -> None:
        self.bank, self.link, self.per_neuron, self.record = bank, link, per_neuron, record
        self.row_bytes = bank.host[0, 0].numel() * bank.host.element_size()
        self.jobs: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self.free_seconds = 0.0
        nothing = np.zeros(0, np.int32)
        copy_rows(_words(bank.host[0]), nothing, _words(bank.host[0]), nothing)  # compiles before the clock runs
        self.thread = threading.Thread(target=self._work, name="h2d", daemon=True)
        self.thread.start()

    def prefetch(self, layer: int, ids: np.ndarray, slots: np.ndarray) -> threading.Event:
        """Queue the copy; the event is set when the emulated link has moved the last neuron."""
        done = threading.Event()
        self.jobs.put((layer, ids, slots, done, time.perf_counter()))
        return done

    def state(self, layer: int, count_bytes: int) -> threading.Event:
        """Queue the copy of a partial sum behind the prefetches."""
        done = threading.Event()
        self.jobs.put((layer, count_bytes, None, done, time.perf_counter()))
        return done

    def wait(self, token: threading.Event) -> None:
        """Block until the copy has ended."""
        token.wait()

    def close(self) -> None:
        """Finish the queue and end the thread."""
        self.jobs.put(None)
        self.thread.join()

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            layer, what, slots, done, asked = job
            start = max(self.free_seconds, asked)
            if slots is None:
                neurons, count_bytes = 0, what
            else:
                neurons, count_bytes = len(what), len(what) * self.row_bytes
                copy_rows(_words(self.bank.host[layer]), what, _words(self.bank.slots[layer]), slots)
            copies = neurons if self.per_neuron and neurons else 1
            self.free_seconds = start + self.link.seconds(copies, count_bytes)
            _sleep_until(self.free_seconds)
            done.set()
            step = "merge" if slots is None else "prefetch"
            self.record(layer, step, "h2d", start, max(self.free_seconds, time.perf_counter()), neurons, count_bytes)


class CudaLink:
    """Copies from pinned memory on a stream of its own; an event for each prefetch.

    ``block`` stages the rows in pinned memory and moves them in one copy; ``copy`` moves each neuron by itself.
    """

    def __init__(self, bank: Bank, issue: str, largest: int, record: Record) -> None:
        if issue == "gather":
            raise InputError("issue 'gather' needs a kernel that CUDA runs do not have yet; plan with --issue block")
        self.bank, self.issue, self.record = bank, issue, record
        device = bank.slots[0].device
        self.stream = torch.cuda.Stream(device)
        shape = (max(largest, 1), *bank.host.shape[2:])
        self.staging = torch.empty(shape, dtype=bank.host.dtype, pin_memory=True)
        self.landing = torch.empty(shape, dtype=bank.host.dtype, device=device)
        self.last = torch.cuda.Event()

    def prefetch(self, layer: int, ids: np.ndarray, slots: np.ndarray) -> torch.cuda.Event:
        """Start the copy; the event fires on the copy's stream."""
        start = time.perf_counter()
        self.stream.wait_stream(torch.cuda.default_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            if self.issue == "copy":
                for neuron, slot in zip(ids.tolist(), slots.tolist(), strict=True):
                    self.bank.slots[layer][slot].copy_(self.bank.host[layer, neuron], non_blocking=True)
            else:
                self.last.synchronize()  # the staging block must have left before it is written again
                n = len(ids)
                here = np.arange(n, dtype=np.int32)
                copy_rows(_words(self.bank.host[layer]), ids, _words(self.staging), here)
                self.landing[:n].copy_(self.staging[:n], non_blocking=True)
                where = torch.from_numpy(slots).to(self.landing.device, torch.int64)
                self.bank.slots[layer].index_copy_(0, where, self.landing[:n])
            done = torch.cuda.Event()
            done.record(self.stream)
            self.last = done
        self.record(layer, "prefetch", "h2d", start, time.perf_counter(), len(ids), 0)
        return done

    def wait(self, token: torch.cuda.Event) -> None:
        """Make the compute stream wait, not the host."""
        torch.cuda.current_stream().wait_event(token)

    def close(self) -> None:
        """Wait for the last copy."""
        self.stream.synchronize()


def _words(rows: torch.Tensor) -> np.ndarray:
    """Rows [neuron, matrix, hidden] as words [neuron, row words] for copying."""
    flat = rows.view(torch.uint8).reshape(rows.shape[0], -1).numpy()
    return flat.view(np.uint64 if flat.shape[1] % 8 == 0 else np.uint16)


def _sleep_until(deadline: float) -> None:
    while (left := deadline - time.perf_counter()) > 0:
        time.sleep(left)
