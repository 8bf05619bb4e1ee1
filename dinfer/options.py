"""What the command line takes as text, checked and turned into values; traces are moved and timelines saved here."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dinfer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dinfer.machine import Link, Machine
    from dinfer.model import ModelSpec
    from dinfer.predictors import Predictors
    from dinfer.timeline import Timeline
    from dinfer.trace import Trace


def free_file(path: Path, force: bool) -> None:
    """Raise InputError unless a file can be written at ``path`` without overwriting, or with ``force``."""
    if path.is_dir():
        raise InputError(f"{path} is a directory; name a file in it")
    if path.exists() and not force:
        raise InputError(f"{path} exists; choose another name or overwrite it with --force")
    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: {path.parent} is no directory; make it first")


def free_directory(path: Path, force: bool) -> Path:
    """Where a new trace for ``path`` is written: there, or beside it while the old one still stands."""
    from dinfer.trace import Trace, refuse_existing

    if not force or not path.exists():
        try:
            refuse_existing(path)
        except InputError:
            raise InputError(f"{path} exists and is not empty; choose another -o or replace it with --force") from None
        return path
    if any(path.iterdir()):
        Trace.load(path)  # only a trace is ever replaced
    beside = path.with_name(path.name + ".new")
    if beside.exists():
        raise InputError(f"{beside} is left of an interrupted recording; move or remove it, then record again")
    return beside


def move_into_place(written: Path, path: Path) -> None:
    """Replace the trace at ``path`` by the complete one at ``written``."""
    if written != path:
        shutil.rmtree(path)
        written.rename(path)


def selected(trace: "Trace", sequences: str | None) -> "Trace":
    """The tokens of ``sequences`` ("3" or "40-47"; None: all) of ``trace``."""
    if sequences is None:
        return trace
    first, dash, last = sequences.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
        raise InputError(f"sequences {sequences!r} is not a number or a range; write 3 or 40-47")
    number = trace.tokens["sequence"]
    chosen = trace.rows(number.between(int(first), int(last or first)).to_numpy())
    if not len(chosen):
        raise InputError(f"sequences {sequences} are not in the trace; it holds {number.min()} to {number.max()}")
    return chosen


def names(text: str) -> tuple[str, ...]:
    """The names in ``text``, between commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def predictor_of(path: Path | None) -> "Predictors | None":
    """The predictor in directory ``path``, None without one."""
    from dinfer.predictors import Predictors

    return None if path is None else Predictors.load(path)


def save_timeline(timeline: "Timeline", path: Path | None) -> None:
    """Write ``timeline`` where a ``path`` is given, and say so."""
    if path is not None:
        timeline.save(path)
        note(f"timeline in {path}; open it in ui.perfetto.dev")


def note(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)


def parse_budget(text: str, spec: "ModelSpec", machine: "Machine", context: int, batch: int = 1) -> int:
    """Bytes of ``text``: a size, or a percentage of all neurons that the budget shall hold."""
    from dinfer.solve import budget_for_share
    from dinfer.units import parse_bytes

    if not text.strip().endswith("%"):
        return parse_bytes(text)
    try:
        share = float(text.strip()[:-1]) / 100
    except ValueError:
        raise InputError(f"vram {text!r} is no percentage; write 50% or a size such as 8GiB") from None
    return budget_for_share(spec, machine, share, context, batch)


def parse_link(text: str, device: str) -> "Link":
    """The emulated link of a rate such as ``4GB/s``; raises InputError where the link is a real one."""
    from dinfer.machine import Link
    from dinfer.units import parse_bytes

    if device != "cpu":
        raise InputError(f"link {text!r} is given, but --device {device} has a real one; leave --link out")
    rate = parse_bytes(text.strip().removesuffix("/s"))
    if rate < 1:
        raise InputError(f"link {text!r} moves nothing; write a rate such as 4GB/s")
    return Link(f"emulated {text.strip()}", 10e-6, rate)


def thresholds_of(trace: Path) -> tuple[float, ...]:
    """The activity thresholds of the trace in directory ``trace``."""
    from dinfer.trace import Trace

    return tuple(Trace.load(trace).meta.get("thresholds", ()))


def check_what_to_run(prompts: "Sequence[str]", replay: Path | None, tokens: int, sequences: str | None) -> None:
    """Raise InputError unless there is one thing to run, prompts or a replay, and none is empty.

    Without either, ``prompts`` holds what stdin said.
    """
    if replay is None and list(prompts) in ([], [""]):
        raise InputError("neither of --prompt and --replay given, nor text on stdin; give one of them")
    if prompts and replay is not None:
        raise InputError("both of --prompt and --replay given; give one: a text to answer or a trace to replay")
    if not all(text.strip() for text in prompts):
        raise InputError("prompt is empty; give --prompt some text")
    if prompts and sequences is not None:
        raise InputError(f"sequences {sequences} are of a trace; give --replay TRACE or leave them out")
    if tokens < 1:
        raise InputError(f"tokens is {tokens}; it must be at least 1")
