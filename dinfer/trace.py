"""Who was active: per token and layer the active neurons, and optionally score, contribution and residual.

A trace is a directory; docs/trace.md is the format. Arrays are plain little-endian rows, memory-mapped when read.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from dinfer import bits
from dinfer.errors import InputError
from dinfer.model import ModelSpec

FORMAT = "dinfer-trace"
VERSION = 1
TOKEN_COLUMNS = ("id", "sequence", "position", "phase")
ARRAYS = {"active": "<u8", "score": "|u1", "contribution": "|u1", "hidden": "<f2", "gate": "|u1"}


@dataclass(frozen=True, eq=False)
class Trace:
    """Activations of ``len(tokens)`` tokens of one model.

    ``tokens``: table of ``id``, ``sequence``, ``position`` (int32) and ``phase`` ("prefill" or "decode").
    ``active``: uint64 [token, layer, words], bit-packed active sets.
    ``score``, ``contribution``, ``gate``: uint8 [token, layer, neuron] or None, on the scale of ``encode_levels``;
    ``gate`` is the magnitude of act(gate), of gated magnitude kinds.
    ``hidden``: float16 [token, layer, hidden] or None, the un-normalised residual after attention.
    ``meta``: how it was made; ``kind`` is "recorded" or "synthetic", ``thresholds`` [layers] the activity thresholds,
    ``score_scale``, ``contribution_scale`` and ``gate_scale`` [layers] the values of code 255.
    """

    spec: ModelSpec
    tokens: pd.DataFrame
    active: np.ndarray
    meta: Mapping[str, Any] = field(default_factory=dict)
    score: np.ndarray | None = None
    contribution: np.ndarray | None = None
    hidden: np.ndarray | None = None
    gate: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def synthetic(self) -> bool:
        """Whether the activity was generated from statistics instead of recorded from a model."""
        return self.meta.get("kind") != "recorded"

    @cached_property
    def frequency(self) -> np.ndarray:
        """Share of tokens in which each neuron is active: float32 [layer, neuron]."""
        total = np.zeros((self.spec.layers, self.spec.neurons), np.int64)
        for start in range(0, len(self), 256):
            total += bits.unpack(self.active[start : start + 256], self.spec.neurons).sum(axis=0)
        return (total / max(len(self), 1)).astype(np.float32)

    @property
    def density(self) -> np.ndarray:
        """Mean share of active neurons in each layer: float64 [layer]."""
        return self.frequency.mean(axis=1, dtype=np.float64)

    def rows(self, mask: np.ndarray) -> "Trace":
        """The trace of the tokens where boolean ``mask`` [token] is true, in order."""
        where = np.flatnonzero(mask)
        whole = len(where) and where[-1] - where[0] + 1 == len(where)
        pick = slice(where[0], where[-1] + 1) if whole else where

        def take(array: np.ndarray | None) -> np.ndarray | None:
            return None if array is None else array[pick]

        picked = replace(
            self,
            tokens=self.tokens.iloc[where].reset_index(drop=True),
            active=self.active[pick],
            score=take(self.score),
            contribution=take(self.contribution),
            hidden=take(self.hidden),
            gate=take(self.gate),
        )
        picked.__dict__.pop("frequency", None)
        return picked

    def phase(self, name: str) -> "Trace":
        """The tokens of one phase, "prefill" or "decode"."""
        return self.rows((self.tokens["phase"] == name).to_numpy())

    def sequence(self, number: int) -> "Trace":
        """The tokens of one sequence; raises InputError when it has none."""
        mask = (self.tokens["sequence"] == number).to_numpy()
        if not mask.any():
            numbers = self.tokens["sequence"]
            raise InputError(f"sequence {number} is not in the trace; it holds {numbers.min()} to {numbers.max()}")
        return self.rows(mask)

    def hold_out(self, tokens: int) -> tuple["Trace", "Trace"]:
        """The trace without its last sequences, and those: the fewest that hold ``tokens`` decode tokens.

        Raises InputError when that leaves no sequence to learn from.
        """
        decoded = (self.tokens["phase"] == "decode").groupby(self.tokens["sequence"]).sum()[::-1].cumsum()
        first = decoded.index[min(int((decoded < tokens).sum()), len(decoded) - 1)]
        held_out = (self.tokens["sequence"] >= first).to_numpy()
        if held_out.all():
            raise InputError(
                f"the trace's {len(decoded)} sequences hold {int(decoded.max())} decode tokens; "
                f"holding out {tokens} leaves none to learn from, record more"
            )
        return self.rows(~held_out), self.rows(held_out)

    def later(self, tokens: int) -> "Trace":
        """The same activity after ``tokens`` more tokens of context: a longer prompt, or earlier turns of a chat."""
        return replace(self, tokens=self.tokens.assign(position=self.tokens["position"] + np.int32(tokens)))

    def batched(self, size: int) -> "Trace":
        """Decode tokens of ``size`` sequences at a time, stepped together as far as the shortest goes.

        A step's active set is the union of theirs (each neuron's weights are read once for all), its position the sum
        of their positions: the context whose KV is read. Left-over sequences are dropped.
        Raises InputError when the trace has fewer than ``size`` sequences with decode tokens.
        """
        tables, actives = [], []
        for number, parts in enumerate(self.together(size)):
            position = np.sum([part.tokens["position"].to_numpy() for part in parts], axis=0)
            tables.append(parts[0].tokens.assign(sequence=np.int32(number), position=position))
            actives.append(np.bitwise_or.reduce([part.active for part in parts]))
        tokens = _as_token_table(tables)
        return Trace(self.spec, tokens, np.concatenate(actives), {**self.meta, "batch": size})

    def together(self, size: int) -> list[list["Trace"]]:
        """The decode tokens of ``size`` sequences at a time, each cut to the shortest of them; see ``batched``."""
        decoded = self.phase("decode")
        numbers = decoded.tokens["sequence"].unique()
        if not 1 <= size <= len(numbers):
            raise InputError(f"batch is {size}; it must be 1 to {len(numbers)}, the sequences that the trace decodes")
        groups = []
        for i in range(0, len(numbers) - size + 1, size):
            parts = [decoded.sequence(int(sequence)) for sequence in numbers[i : i + size]]
            steps = min(len(part) for part in parts)
            groups.append([part.rows(np.arange(len(part)) < steps) for part in parts])
        return groups

    @property
    def fingerprint(self) -> str:
        """First 16 hex digits of a SHA-256 over shape, tokens and each neuron's count of activations."""
        digest = hashlib.sha256(self.spec.fingerprint().encode())
        for column in TOKEN_COLUMNS[:3]:
            digest.update(self.tokens[column].to_numpy(dtype="<i4").tobytes())
        digest.update(np.rint(self.frequency * len(self)).astype("<i4").tobytes())
        return digest.hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write the trace to the new directory ``path``; raises InputError when it exists and is not empty."""
        with TraceWriter(path, self.spec, self.meta, arrays=self.optional_arrays) as writer:
            for start in range(0, len(self), 256):
                chunk = slice(start, start + 256)
                optional = {name: getattr(self, name)[chunk] for name in self.optional_arrays}
                writer.append(self.tokens.iloc[chunk], self.active[chunk], **optional)

    @property
    def optional_arrays(self) -> tuple[str, ...]:
        """Names of the arrays besides ``active`` that this trace has."""
        return tuple(name for name in list(ARRAYS)[1:] if getattr(self, name) is not None)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The trace in directory ``path``, arrays memory-mapped (copy on write); its committed tokens only.

        Raises InputError for a directory that is no trace, is of a later version, or is shorter than it says.
        """
        meta = _read_meta(Path(path))
        spec = ModelSpec.from_dict(meta["spec"])
        count = meta["tokens"]
        shapes = array_shapes(spec)
        arrays = {name: _map(Path(path), name, (count, *shapes[name])) for name in meta["arrays"]}
        tokens = _read_tokens(Path(path), count)
        return cls(spec=spec, tokens=tokens, meta=meta["made"], **arrays)

    def summary(self) -> pd.DataFrame:
        """One row: model, kind, tokens, sequences, prefill and decode tokens, mean density."""
        phases = self.tokens["phase"].value_counts()
        return pd.DataFrame(
            {
                "model": [self.spec.name],
                "kind": ["synthetic" if self.synthetic else "recorded"],
                "tokens": [len(self)],
                "sequences": [self.tokens["sequence"].nunique()],
                "prefill": [int(phases.get("prefill", 0))],
                "decode": [int(phases.get("decode", 0))],
                "density": [float(self.density.mean())],
            }
        )


def join(parts: Sequence[str | Path], out: str | Path) -> Trace:
    """The traces in directories ``parts``, one after the other, in the new directory ``out``.

    Parts of one recording: a sequence that an earlier part holds too is left out. Raises InputError for parts of
    other models, weights or arrays, and when ``out`` is not free.
    """
    traces = [Trace.load(part) for part in parts]
    first, seen = traces[0], set()  # type: Trace, set[int]
    for part, trace in zip(parts, traces, strict=True):
        for what in ("weights", "thresholds", "score_scale", "contribution_scale", "prompt_indices"):
            if trace.spec != first.spec or trace.meta.get(what) != first.meta.get(what):
                raise InputError(f"{part} has another {what} than {parts[0]}; join parts of one recording")
        if trace.optional_arrays != first.optional_arrays:
            raise InputError(f"{part} has other arrays than {parts[0]}; join parts of one recording")
    with TraceWriter(out, first.spec, first.meta, first.optional_arrays) as writer:
        for trace in traces:
            rows = np.flatnonzero(~trace.tokens["sequence"].isin(seen).to_numpy())
            for start in range(0, len(rows), 256):
                chunk = rows[start : start + 256]
                optional = {name: getattr(trace, name)[chunk] for name in trace.optional_arrays}
                writer.append(trace.tokens.iloc[chunk], trace.active[chunk], **optional)
            seen |= set(trace.tokens["sequence"].tolist())
    return Trace.load(out)


def array_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of one token's row in each array of a trace."""
    per_neuron = (spec.layers, spec.neurons)
    return {
        "active": (spec.layers, spec.words),
        "score": per_neuron,
        "contribution": per_neuron,
        "hidden": (spec.layers, spec.hidden),
        "gate": per_neuron,
    }


def refuse_existing(path: Path) -> None:
    """Raise InputError unless ``path`` is free for a new trace: absent, or an empty directory."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists and is not empty; a recording never overwrites, choose another -o")


class TraceWriter:
    """Appends tokens to a trace on disk; what is committed stays readable whatever happens later.

    ``append`` writes rows, ``commit`` publishes them: array bytes first, then tokens.parquet, then meta.json, the
    last two by atomic replacement. Leaving the ``with`` block commits, also after an exception.
    """

    def __init__(
        self,
        path: str | Path,
        spec: ModelSpec,
        made: Mapping[str, Any],
        arrays: tuple[str, ...] = (),
        commit_every: int = 256,
    ) -> None:
        self.path = Path(path)
        refuse_existing(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.spec, self.made, self.commit_every = spec, dict(made), commit_every
        self.shapes = {name: array_shapes(spec)[name] for name in ("active", *arrays)}
        self.files = {name: (self.path / f"{name}.bin").open("wb") for name in self.shapes}
        self.tokens: list[pd.DataFrame] = []
        self.count = self.committed = 0
        self.commit()

    def append(self, tokens: pd.DataFrame, active: np.ndarray, **optional: np.ndarray) -> None:
        """Append rows: ``tokens`` with the four columns, ``active`` and the arrays named at the start."""
        given = {"active": active, **optional}
        if set(given) != set(self.shapes):
            raise InputError(f"trace {self.path} holds {', '.join(self.shapes)}, but {', '.join(given)} was appended")
        for name, array in given.items():
            expected = (len(tokens), *self.shapes[name])
            if array.shape != expected:
                raise InputError(f"trace array {name} has shape {array.shape}; it must be {expected}")
            self.files[name].write(np.ascontiguousarray(array, dtype=ARRAYS[name]).tobytes())
        self.tokens.append(tokens.loc[:, list(TOKEN_COLUMNS)])
        self.count += len(tokens)
        if self.count - self.committed >= self.commit_every:
            self.commit()

    def commit(self) -> None:
        """Make all appended tokens readable."""
        for file in self.files.values():
            file.flush()
        table = _as_token_table(self.tokens)
        self.tokens = [table]
        _replace(self.path / "tokens.parquet", lambda temporary: table.to_parquet(temporary, index=False))
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "tokens": self.count,
            "arrays": {name: ARRAYS[name] for name in self.shapes},
            "spec": self.spec.to_dict(),
            "made": self.made,
        }
        _replace(self.path / "meta.json", lambda temporary: temporary.write_text(json.dumps(meta, indent=1) + "\n"))
        self.committed = self.count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.commit()
        for file in self.files.values():
            file.close()


def encode_levels(values: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """8-bit logarithmic codes of magnitudes: 0 for 0, else ``255 + 16 log2(|value| / scale)`` clipped to 1..255.

    Sixteen steps an octave (2.2% worst rounding) over the 15.9 octaves below ``scale``; smaller ones become 1.
    """
    magnitude = np.abs(values)
    with np.errstate(divide="ignore"):
        codes = np.rint(255 + 16 * np.log2(magnitude / scale, dtype=np.float32))
    return np.where(magnitude > 0, np.clip(codes, 1, 255), 0).astype(np.uint8)


def decode_levels(codes: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """Magnitudes (float32) of ``encode_levels``' codes: 0 for 0, else ``scale * 2 ** ((code - 255) / 16)``."""
    levels = np.exp2((np.arange(256) - 255) / 16).astype(np.float32)
    levels[0] = 0
    return levels[codes] * np.float32(scale)


def _as_token_table(parts: list[pd.DataFrame]) -> pd.DataFrame:
    if not parts:
        parts = [pd.DataFrame({name: [] for name in TOKEN_COLUMNS})]
    table = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
    return table.astype({"id": "int32", "sequence": "int32", "position": "int32", "phase": "str"})


def _replace(path: Path, write: Any) -> None:
    temporary = path.with_name(path.name + ".new")
    write(temporary)
    os.replace(temporary, path)


def _read_meta(path: Path) -> dict[str, Any]:
    file = path / "meta.json"
    if not file.is_file():
        raise InputError(f"{path} is no trace: it lacks meta.json; record one with `dinfer record MODEL -o {path}`")
    try:
        meta = json.loads(file.read_text())
    except ValueError as error:
        raise InputError(f"{file} is not JSON ({error}); the trace is damaged, record it again") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise InputError(f"{file} does not say format {FORMAT!r}; it is not a trace of dinfer")
    if missing := [key for key in ("version", "tokens", "arrays", "spec", "made") if key not in meta]:
        raise InputError(f"{file} lacks {missing[0]}; the trace is damaged, record it again")
    if meta["version"] > VERSION:
        raise InputError(f"{file} has version {meta['version']}, this dinfer reads up to {VERSION}; upgrade dinfer")
    if not isinstance(meta["tokens"], int) or meta["tokens"] < 0:
        raise InputError(f"{file} has tokens {meta['tokens']!r}; it must be a whole number of at least 0")
    _check_arrays(file, meta["arrays"])
    return meta


def _check_arrays(file: Path, arrays: dict[str, str]) -> None:
    if unknown := set(arrays) - set(ARRAYS):
        raise InputError(f"{file} names the array {sorted(unknown)[0]!r}; known are {', '.join(ARRAYS)}")
    if "active" not in arrays:
        raise InputError(f"{file} lacks the array active; the trace is damaged, record it again")
    for name, dtype in arrays.items():
        if dtype != ARRAYS[name]:
            raise InputError(f"{file} stores {name} as {dtype!r}; it must be {ARRAYS[name]!r}")


def _read_tokens(path: Path, count: int) -> pd.DataFrame:
    try:
        tokens = pd.read_parquet(path / "tokens.parquet")
    except (OSError, ValueError) as error:
        raise InputError(f"{path / 'tokens.parquet'} cannot be read ({str(error).splitlines()[0]})") from None
    if len(tokens) < count or not set(TOKEN_COLUMNS) <= set(tokens):
        raise InputError(f"{path / 'tokens.parquet'} has {len(tokens)} rows, meta.json says {count}; it is truncated")
    return tokens.iloc[:count].reset_index(drop=True)


def _map(path: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    file = path / f"{name}.bin"
    expected = int(np.prod(shape, dtype=np.int64)) * np.dtype(ARRAYS[name]).itemsize
    actual = file.stat().st_size if file.is_file() else 0
    if actual < expected:
        raise InputError(
            f"{file} has {actual} bytes, its {shape[0]} tokens need {expected}; the trace is truncated, record it again"
        )
    if shape[0] == 0:
        return np.zeros(shape, ARRAYS[name])
    return np.memmap(file, dtype=ARRAYS[name], mode="c", shape=shape)
