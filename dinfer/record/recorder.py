"""Real model and prompts -> Trace: who was active while the model wrote, streamed to disk."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from warnings import warn

import numpy as np
import pandas as pd
import torch

from dinfer import bits
from dinfer.errors import InputError
from dinfer.model import ModelSpec
from dinfer.record.calibrate import ALLOCATIONS, Calibration, activated, calibrate, checked_thresholds, down_norms
from dinfer.record.generate import Loaded, Sampling, Step, generate, listening, load
from dinfer.trace import Trace, TraceWriter, encode_levels, refuse_existing

CALIBRATION_PROMPTS = 8
"""At most so many prompts are kept out of the recording to calibrate thresholds and scales."""

CALIBRATION_NEW_TOKENS = 64
"""At most so many tokens are written after a calibration prompt."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

Prompts = str | Path | Sequence[str] | Sequence[Sequence[int]]


def record(
    model_dir: str | Path,
    prompts: Prompts,
    tokens: int,
    out: str | Path,
    *,
    sparsity: float | None = None,
    thresholds: Sequence[float] | None = None,
    allocation: str = "uniform",
    hidden: bool = False,
    levels: bool = True,
    max_new_tokens: int = 64,
    batch: int = 8,
    seed: int = 0,
    temperature: float = 0.8,
    top_p: float = 0.95,
    device: str = "cpu",
    dtype: str = "float32",
    first_sequence: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Record whole sequences until ``tokens`` decode tokens are in the new trace directory ``out``.

    ``prompts`` is a file (see ``read_prompts``), texts, or lists of token ids; some are kept out to calibrate, the
    others are shuffled by ``seed``. ``first_sequence`` starts later in their order, so that several processes record
    parts of one trace, which ``trace.join`` puts together. A row is one token fed to the model: those of the prompt are
    ``prefill``, those that it wrote are ``decode``; ``id`` is the token that went in. ReLU kinds are active iff gate >
    t, their own, or raised by ``sparsity`` or ``thresholds`` [layers]. Magnitude kinds need one of these: active iff
    |value at down's input| > threshold;
    ``allocation`` is one of calibrate.ALLOCATIONS. ``levels`` adds score and contribution (and gate, of gated magnitude
    kinds), ``hidden`` the float16 residual (clipped to its range). Memory holds one batch. ``progress`` is called with
    (decode tokens so far, ``tokens``). At temperature 0 each prompt is used once and a shortfall is warned of; else the
    prompts go round.
    Raises InputError for bad input before anything is written.
    """
    _check_numbers(tokens, max_new_tokens, batch, temperature, top_p)
    if allocation not in ALLOCATIONS:
        raise InputError(f"allocation {allocation!r} is not one of {', '.join(ALLOCATIONS)}")
    refuse_existing(Path(out))
    texts, prompts_name, domains = _prompts(prompts)
    loaded = load(model_dir, device, dtype)
    checked_thresholds(loaded, sparsity, thresholds)
    encoded = _encode(loaded, texts, max_new_tokens)
    recorded, kept_out = _split(len(encoded), seed)
    sampling = Sampling(temperature, top_p, seed)
    _check_reach(tokens, max(0, len(recorded) - first_sequence), max_new_tokens, temperature)
    with spare_core():
        calibration = calibrate(
            loaded,
            [encoded[i] for i in kept_out],
            sparsity=sparsity,
            thresholds=thresholds,
            allocation=allocation,
            max_new_tokens=min(max_new_tokens, CALIBRATION_NEW_TOKENS),
            sampling=sampling._replace(seed=seed + 1),
        )
        made = _made(loaded, calibration, sampling, prompts_name, recorded, max_new_tokens, batch)
        if domains:
            made["domains"] = [domains[i] for i in recorded]
        arrays = _arrays(loaded.spec, levels, hidden)
        with TraceWriter(out, loaded.spec, made, arrays) as writer:
            log = _Log(loaded, calibration, arrays)
            used = [encoded[i] for i in recorded]
            _record_into(
                writer, loaded, log, used, tokens, max_new_tokens, batch, sampling, first_sequence, progress
            )
    return Trace.load(out)


@contextmanager
def spare_core() -> Iterator[None]:
    """Let torch leave one core free meanwhile.

    Its threads spin while they wait for each other: a second thread on 2 cores gained nothing on an idle machine
    (27.7 s against 27.5 s for the same recording) and cost many times as much on a busy one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, (os.cpu_count() or 1) - 1)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def read_prompts(file: str | Path) -> list[str]:
    """The prompts of a file: JSON lines with a field ``prompt`` (.jsonl), else one prompt a line.

    Raises InputError for a missing file, a line without prompt, or no prompt at all.
    """
    return [prompt for prompt, _ in _read_prompts(Path(file))]


def _read_prompts(path: Path) -> list[tuple[str, str]]:
    """Prompts with their domains, empty where the file names none."""
    if not path.is_file():
        raise InputError(f"prompts {path} is no file; give JSON lines with a field prompt")
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"prompts {path} is no UTF-8 text (byte {error.start}); give JSON lines or text") from None
    numbered = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    json_lines = path.suffix == ".jsonl"
    lines = [_json_prompt(path, n, line) if json_lines else (line, "") for n, line in numbered]
    if not lines:
        raise InputError(f"prompts {path} has 0 prompts; it needs at least 1")
    return lines


def _json_prompt(path: Path, number: int, line: str) -> tuple[str, str]:
    try:
        read = json.loads(line)
        return str(read["prompt"]), str(read.get("domain", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f"prompts {path}, line {number}: {line[:40]!r} is no JSON object with a field prompt"
        ) from None


def _arrays(spec: ModelSpec, levels: bool, hidden: bool) -> tuple[str, ...]:
    """What is recorded besides who was active; of a ReLU kind the gate is the score."""
    gated = spec.gated and spec.sparsity_kind == "magnitude"
    return ("score", "contribution") * levels + ("hidden",) * hidden + ("gate",) * (levels and gated)


def _check_numbers(tokens: int, max_new_tokens: int, batch: int, temperature: float, top_p: float) -> None:
    counts = {"tokens": tokens, "max_new_tokens": max_new_tokens, "batch": batch}
    for name, value in counts.items():
        if value < 1:
            raise InputError(f"{name} is {value}; it must be at least 1")
    if not 0 < top_p <= 1:
        raise InputError(f"top_p is {top_p:g}; it must lie above 0 and be at most 1")
    if temperature < 0:
        raise InputError(f"temperature is {temperature:g}; it must be at least 0 (0 is greedy)")


def _check_reach(tokens: int, prompts: int, max_new_tokens: int, temperature: float) -> None:
    most = prompts * max_new_tokens
    if temperature == 0 and most < tokens:
        raise InputError(
            f"tokens is {tokens}, but {prompts} prompts of {max_new_tokens} new tokens give at most "
            f"{most} at temperature 0; give more prompts, more new tokens or a temperature"
        )


def _prompts(prompts: Prompts) -> tuple[list[Any], str | None, list[str]]:
    """The prompts, their file's name and their domains; none where not every prompt of the file has one."""
    if isinstance(prompts, str | Path):
        texts, domains = map(list, zip(*_read_prompts(Path(prompts)), strict=True))
        return texts, Path(prompts).name, domains if all(domains) else []
    if not len(prompts):
        raise InputError("prompts has 0 entries; it needs at least 1")
    return list(prompts), None, []


def _split(count: int, seed: int) -> tuple[list[int], list[int]]:
    """Indices of recorded prompts, shuffled, and of kept-out ones; fewer than 4 serve both ends."""
    everything = [int(i) for i in np.random.default_rng(seed).permutation(count)]
    if count < 4:
        return everything, everything
    kept = min(CALIBRATION_PROMPTS, max(2, count // 5))
    out = {int(i) for i in np.linspace(0, count - 1, kept).round()}
    return [i for i in everything if i not in out], sorted(out)


def _encode(loaded: Loaded, texts: list[Any], max_new_tokens: int) -> list[list[int]]:
    """Token ids of each prompt, through the chat template where the tokenizer has one."""
    tokenizer = _tokenizer(loaded) if any(isinstance(text, str) for text in texts) else None
    encoded = []
    for number, text in enumerate(texts):
        if not (text.strip() if isinstance(text, str) else len(text)):
            raise InputError(f"prompt {number} is empty; it needs at least one token")
        ids = _chat_ids(tokenizer, text) if isinstance(text, str) else [int(i) for i in text]
        _check_ids(loaded, number, ids, max_new_tokens)
        encoded.append(ids)
    return encoded


def _check_ids(loaded: Loaded, number: int, ids: list[int], max_new_tokens: int) -> None:
    spec = loaded.spec
    if bad := [i for i in ids if not 0 <= i < spec.vocab]:
        raise InputError(f"prompt {number} holds the id {bad[0]}; {spec.name} has {spec.vocab} ids")
    if len(ids) + max_new_tokens > spec.max_positions:
        raise InputError(
            f"prompt {number} has {len(ids)} tokens, with {max_new_tokens} new ones more than the "
            f"{spec.max_positions} positions of {spec.name}; shorten it or lower --new-tokens"
        )


def _tokenizer(loaded: Loaded) -> Any:
    from transformers import AutoTokenizer

    directory = loaded.checkpoint.directory
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise InputError(f"model {directory} has no tokenizer; give prompts as lists of token ids")
    return AutoTokenizer.from_pretrained(directory)


def _chat_ids(tokenizer: Any, text: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer(text)["input_ids"]
    turn = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return tokenizer(chat, add_special_tokens=False)["input_ids"]


def _made(
    loaded: Loaded,
    calibration: Calibration,
    sampling: Sampling,
    prompts_name: str | None,
    recorded: list[int],
    max_new_tokens: int,
    batch: int,
) -> dict[str, Any]:
    """What a trace's meta says about this recording."""
    return {
        "kind": "recorded",
        "model": loaded.spec.name,
        "weights": loaded.checkpoint.fingerprint,
        "prompts": prompts_name,
        "prompt_indices": recorded,  # sequence s is prompt prompt_indices[s % len]
        "sampling": {**sampling._asdict(), "max_new_tokens": max_new_tokens, "batch": batch},
        "seed": sampling.seed,
        "device": str(loaded.device),
        "thresholds": [float(x) for x in calibration.thresholds],
        "score_scale": [float(x) for x in calibration.score_scale],
        "contribution_scale": [float(x) for x in calibration.contribution_scale],
        "gate_scale": [float(x) for x in calibration.gate_scale],
        "calibration": calibration.costs(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _record_into(
    writer: TraceWriter,
    loaded: Loaded,
    log: "_Log",
    prompts: list[list[int]],
    tokens: int,
    max_new_tokens: int,
    batch: int,
    sampling: Sampling,
    sequence: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Run batch after batch, appending whole sequences in order, until ``tokens`` decode tokens are written."""
    begun, decoded = time.perf_counter(), 0
    rounds = len(prompts) if sampling.temperature == 0 else None
    with listening(loaded, log) as listener:
        while decoded < tokens and sequence != rounds:
            count = min(batch, -(-(tokens - decoded) // max_new_tokens))
            if rounds is not None:
                count = min(count, rounds - sequence)
            chosen = [prompts[(sequence + i) % len(prompts)] for i in range(count)]
            steps = generate(loaded, listener, chosen, max_new_tokens, sampling, sequence)
            for rows in _sequences(steps, log, count):
                if decoded >= tokens:
                    break
                writer.append(rows.table(sequence), **rows.arrays())
                decoded += sum(phase == "decode" for phase in rows.phases)
                sequence += 1
                if progress:
                    progress(decoded, tokens)
    writer.made["decode_tokens_per_second"] = round(decoded / (time.perf_counter() - begun), 2)
    if decoded < tokens:
        warn(
            f"{writer.path} holds {decoded} decode tokens of {tokens}: all {sequence} prompts are "
            "used and temperature is 0; give more prompts or a temperature",
            stacklevel=3,
        )


@dataclass
class _Rows:
    """What one sequence has given so far, position after position."""

    ids: list[int] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    parts: list[dict[str, np.ndarray]] = field(default_factory=list)

    def table(self, sequence: int) -> pd.DataFrame:
        """The token columns of a trace."""
        positions = range(len(self.ids))
        columns = {"id": self.ids, "sequence": sequence, "position": positions}
        return pd.DataFrame(columns | {"phase": self.phases})

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of a trace, [token, layer, ...]."""
        return {name: np.concatenate([p[name] for p in self.parts]) for name in self.parts[0]}


def _sequences(steps: Iterator[Step], log: "_Log", count: int) -> list[_Rows]:
    """Run a batch to its end and sort what ``log`` heard by sequence."""
    rows = [_Rows() for _ in range(count)]
    for step in steps:
        heard, at = log.take(), 0
        for sequence, ids in zip(step.sequences, step.ids, strict=True):
            mine = rows[sequence]
            mine.ids += ids
            mine.phases += [step.phase] * len(ids)
            mine.parts.append({name: array[at : at + len(ids)] for name, array in heard.items()})
            at += len(ids)
    return rows


class _Log:
    """Sink: the rows of a trace of one forward pass, layer by layer."""

    def __init__(self, loaded: Loaded, calibration: Calibration, arrays: tuple[str, ...]) -> None:
        self.spec, self.calibration, self.arrays = loaded.spec, calibration, arrays
        self.norms = [norm.cpu().numpy() for norm in down_norms(loaded)]
        self.layers: dict[str, list[np.ndarray]] = {name: [] for name in ("active", *arrays)}

    def __call__(self, layer: int, hidden: torch.Tensor, gate: torch.Tensor, value: torch.Tensor) -> None:
        scales = self.calibration
        magnitude = value.float().abs()
        if self.spec.sparsity_kind == "relu":
            score = (gate.float() - self.spec.gate_threshold).clamp(min=0)
            active = gate.float() > float(scales.thresholds[layer])
        else:
            score = magnitude
            active = magnitude > float(scales.thresholds[layer])
        rows = {"active": bits.pack(active.cpu().numpy())}
        if "score" in self.arrays:
            rows["score"] = encode_levels(score.cpu().numpy(), scales.score_scale[layer])
        if "contribution" in self.arrays:
            contribution = magnitude.cpu().numpy() * self.norms[layer]
            rows["contribution"] = encode_levels(contribution, scales.contribution_scale[layer])
        if "gate" in self.arrays:
            rows["gate"] = encode_levels(activated(gate, self.spec).cpu().numpy(), scales.gate_scale[layer])
        if "hidden" in self.arrays:
            limit = torch.finfo(torch.float16).max
            rows["hidden"] = hidden.float().clamp(-limit, limit).half().cpu().numpy()
        for name, array in rows.items():
            self.layers[name].append(array)

    def take(self) -> dict[str, np.ndarray]:
        """The arrays [token, layer, ...] heard since the last call."""
        taken = {name: np.stack(parts, axis=1) for name, parts in self.layers.items()}
        for parts in self.layers.values():
            parts.clear()
        return taken
