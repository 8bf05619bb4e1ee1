"""Spans of a real run; every stream writes its own, the decoding thread in laps without gaps."""

import time
from typing import Any

import torch

from dinfer.timeline import Span


class Clock:
    """Collects spans in seconds since the first token; time in which it is paused does not count.

    On CUDA the laps of the decoding thread are CUDA events, so that they tell when the GPU did the work.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.spans: list[Span] = []
        self.laps: list[tuple[Any, ...]] = []
        self.measured: list[tuple[Any, ...]] = []
        self.token = 0
        self.elapsed = 0.0
        self.base = self.last = time.perf_counter()
        self.resolved = 0.0

    def resume(self) -> None:
        """Let time count from here on."""
        if self.cuda:
            torch.cuda.synchronize()
            self.origin = torch.cuda.Event(enable_timing=True)
            self.origin.record()
            self.resolved = self.elapsed
        self.base = time.perf_counter() - self.elapsed
        self.last = time.perf_counter()

    def pause(self) -> None:
        """Stop counting; the device's work so far is waited for."""
        self.resolve()
        self.elapsed = time.perf_counter() - self.base

    def lap(self, layer: int, step: str, neurons: int = 0) -> None:
        """The decoding thread did ``step`` since its last lap."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.laps.append((self.token, layer, step, event, neurons))
            return
        now = time.perf_counter()
        self.spans.append(Span(self.token, layer, step, "gpu", self.last - self.base, now - self.base, neurons))
        self.last = now

    def record(
        self, layer: int, step: str, stream: str, start: float, end: float, neurons: int = 0, count_bytes: int = 0
    ) -> None:
        """Another thread did ``step`` on ``stream`` from ``start`` to ``end`` (perf_counter seconds)."""
        self.spans.append(
            Span(self.token, layer, step, stream, start - self.base, end - self.base, neurons, count_bytes)
        )

    def measure(
        self, layer: int, step: str, stream: str, begin: Any, end: Any, neurons: int = 0, count_bytes: int = 0
    ) -> None:
        """A CUDA stream did ``step`` between its events ``begin`` and ``end``."""
        self.measured.append((self.token, layer, step, stream, begin, end, neurons, count_bytes))

    def resolve(self) -> None:
        """Make spans of all events so far; on CUDA the device's work is waited for."""
        if not self.cuda:
            return
        torch.cuda.synchronize()
        for token, layer, step, event, neurons in self.laps:
            end = self.elapsed + self.origin.elapsed_time(event) / 1e3
            self.spans.append(Span(token, layer, step, "gpu", self.resolved, end, neurons))
            self.resolved = end
        self.laps.clear()
        for token, layer, step, stream, begin, end, *amounts in self.measured:
            times = (self.elapsed + self.origin.elapsed_time(event) / 1e3 for event in (begin, end))
            self.spans.append(Span(token, layer, step, stream, *times, *amounts))
        self.measured.clear()
