"""What happened when: one row a span, the same columns and words for a simulated and for a real run."""

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pandas as pd

from dinfer.errors import InputError

STREAMS = ("gpu", "cpu", "h2d", "d2h", "scheduler")
"""In-order queues; the same five on both sides."""

STEPS = ("attention", "predict", "schedule", "prefetch", "wait", "ffn_gpu", "ffn_cpu", "merge", "head")
"""What a span can be; a span's code is its index here."""

FORMAT = "dinfer-timeline"
VERSION = 1


class Span(NamedTuple):
    """One span: ``step`` on ``stream`` for one token and layer (-1: none), from ``start`` to ``end`` in seconds."""

    token: int
    layer: int
    step: str
    stream: str
    start_seconds: float
    end_seconds: float
    neurons: int = 0
    bytes: int = 0


COLUMNS = {
    "token": "<i4",
    "layer": "<i4",
    "step": "|i1",
    "stream": "|i1",
    "start_seconds": "<f8",
    "end_seconds": "<f8",
    "neurons": "<i4",
    "bytes": "<i8",
}
SPAN_DTYPE = np.dtype(list(COLUMNS.items()))


@dataclass(frozen=True, eq=False)
class Timeline:
    """Spans of a run of ``tokens`` decoded tokens that took ``seconds`` in all.

    ``spans``: structured array of SPAN_DTYPE, step and stream as codes. ``meta`` says which run it was: ``source``
    ("simulated" or "executed"), plan, machine, ``emulated``, and what was ``believed`` where that changed.
    ``totals`` float64 [9]: seconds of each step where the spans themselves were not kept.
    """

    spans: np.ndarray
    tokens: int
    seconds: float
    meta: Mapping[str, Any] = field(default_factory=dict)
    totals: np.ndarray | None = None

    @classmethod
    def from_spans(cls, spans: list[Span], tokens: int, seconds: float, meta: Mapping[str, Any] | None = None) -> Self:
        """The timeline of a list of spans."""
        step = {name: code for code, name in enumerate(STEPS)}
        stream = {name: code for code, name in enumerate(STREAMS)}
        rows = [s._replace(step=step[s.step], stream=stream[s.stream]) for s in spans]  # type: ignore[arg-type]
        return cls(np.array([tuple(r) for r in rows], SPAN_DTYPE), tokens, seconds, meta or {})

    @property
    def tokens_per_second(self) -> float:
        """Tokens over total time; never the mean of single speeds."""
        return self.tokens / self.seconds if self.seconds > 0 else float("inf")

    @property
    def believed(self) -> np.ndarray:
        """Rows [token, attention, gpu, cpu, link] float64: from that token on, the plan's costs times these factors."""
        return np.array(self.meta.get("believed", ()), float).reshape(-1, 5)

    def busy(self, stream: str) -> float:
        """Seconds in which ``stream`` had work, waiting left out."""
        rows = self.spans[self.spans["stream"] == STREAMS.index(stream)]
        rows = rows[rows["step"] != STEPS.index("wait")]
        return float((rows["end_seconds"] - rows["start_seconds"]).sum())

    def step_seconds(self) -> pd.Series:
        """Seconds of each step summed over layers, per token; index STEPS."""
        total = self.totals
        if total is None:
            seconds = self.spans["end_seconds"] - self.spans["start_seconds"]
            total = np.bincount(self.spans["step"], weights=seconds, minlength=len(STEPS))
        return pd.Series(total / max(self.tokens, 1), index=pd.Index(STEPS, name="step"), name="seconds")

    def to_frame(self) -> pd.DataFrame:
        """One row a span, steps and streams as categories."""
        frame = pd.DataFrame({name: self.spans[name] for name in COLUMNS})
        frame["step"] = pd.Categorical.from_codes(self.spans["step"], categories=pd.Index(STEPS))
        frame["stream"] = pd.Categorical.from_codes(self.spans["stream"], categories=pd.Index(STREAMS))
        return frame

    def to_chrome(self, process: int = 1) -> dict[str, Any]:
        """Chrome trace events (for Perfetto): one process a run, one thread a stream, microseconds."""
        name = f"{self.meta.get('source', 'run')} {self.meta.get('machine', '')}".strip()
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
        ]
        for code, stream in enumerate(STREAMS):
            events.append({"ph": "M", "pid": process, "tid": code, "name": "thread_name", "args": {"name": stream}})
        for row in self.spans:
            events.append(
                {
                    "ph": "X",
                    "pid": process,
                    "tid": int(row["stream"]),
                    "name": STEPS[row["step"]],
                    "ts": float(row["start_seconds"]) * 1e6,
                    "dur": float(row["end_seconds"] - row["start_seconds"]) * 1e6,
                    "args": {name: int(row[name]) for name in ("token", "layer", "neurons", "bytes")},
                }
            )
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> None:
        """Write Chrome trace JSON that Perfetto opens and ``load`` reads back exactly; gzip when it ends in .gz."""
        document = {
            **self.to_chrome(),
            "dinfer": {
                "format": FORMAT,
                "version": VERSION,
                "tokens": self.tokens,
                "seconds": self.seconds,
                "meta": dict(self.meta),
                **({} if self.totals is None else {"totals": self.totals.tolist()}),
                "spans": {name: self.spans[name].tolist() for name in COLUMNS},
            },
        }
        text = json.dumps(document).encode()
        Path(path).write_bytes(gzip.compress(text, mtime=0) if str(path).endswith(".gz") else text)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The timeline that ``save`` wrote; raises InputError for any other file."""
        try:
            raw = Path(path).read_bytes()
            document = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
            saved = document["dinfer"]
            if saved["format"] != FORMAT:
                raise ValueError(saved["format"])
            if saved["version"] > VERSION:
                raise InputError(f"{path} has version {saved['version']}, this dinfer reads up to {VERSION}")
            spans = np.empty(len(saved["spans"]["token"]), SPAN_DTYPE)
            for name in COLUMNS:
                spans[name] = saved["spans"][name]
            for name, words in (("step", STEPS), ("stream", STREAMS)):
                if not np.isin(spans[name], np.arange(len(words))).all():
                    raise ValueError(name)
            totals = np.array(saved["totals"]) if "totals" in saved else None
            return cls(spans, saved["tokens"], saved["seconds"], saved["meta"], totals)
        except FileNotFoundError:
            raise InputError(f"timeline {path} does not exist; write one with --timeline {path}") from None
        except (ValueError, KeyError, TypeError, EOFError, OSError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path} is no timeline of dinfer; write one with `dinfer simulate --timeline`") from None


def save_together(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Write several timelines as processes of one Chrome trace, beside each other in Perfetto; not read back."""
    events = [event for number, one in enumerate(timelines, 1) for event in one.to_chrome(number)["traceEvents"]]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()
    Path(path).write_bytes(gzip.compress(text, mtime=0) if str(path).endswith(".gz") else text)


WORK = ("gpu_active", "cpu_active", "fetched", "wasted")
"""Columns of a run's work: active neurons computed on each side, neurons fetched, fetched but then not active."""


class Answer(NamedTuple):
    """What was written in one sequence: text and token ids."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Run:
    """What a simulated or real run did: the times, the work and the decisions.

    ``work`` int32 [token, layer, 4] with columns WORK. ``fetch`` and ``evict`` int32: the ids of all decisions in
    order of token and layer, ``work[:, :, 2]`` says how many belong to each. ``answers`` are what a real run wrote,
    one for each sequence; of a batch each row of ``work`` is a step of all.
    """

    timeline: Timeline
    work: np.ndarray
    fetch: np.ndarray
    evict: np.ndarray
    answers: tuple[Answer, ...] = ()

    @property
    def text(self) -> str:
        """The first answer's text; empty when nothing was written."""
        return self.answers[0].text if self.answers else ""

    @property
    def ids(self) -> tuple[int, ...]:
        """The first answer's token ids."""
        return self.answers[0].ids if self.answers else ()

    @property
    def gpu_share(self) -> float:
        """Share of active neurons that were computed on the GPU."""
        gpu, cpu = self.work[..., 0].sum(dtype=np.int64), self.work[..., 1].sum(dtype=np.int64)
        return float(gpu / max(gpu + cpu, 1))

    def same_decisions(self, other: "Run") -> bool:
        """Whether both fetched and evicted the same neurons at every token and layer."""
        return all(
            np.array_equal(a, b)
            for a, b in (
                (self.work[:, :, 2], other.work[:, :, 2]),
                (self.fetch, other.fetch),
                (self.evict, other.evict),
            )
        )
