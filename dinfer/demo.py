"""The main job on a real model and real text, step by step, with what each step leaves under one directory."""

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers.utils.logging import disable_progress_bar

from dinfer.compare import compare
from dinfer.errors import InputError
from dinfer.exec import Session, execute, measure_machine
from dinfer.machine import Machine
from dinfer.model import load_model
from dinfer.plan import Plan
from dinfer.plot import plot_compare, plot_memory, plot_timeline
from dinfer.record.fetch import resolve_model
from dinfer.record.recorder import record
from dinfer.record.stats import plot_stats, stats
from dinfer.report import machine_toml, plan_lines, print_table, progress, run_summary, summary_lines
from dinfer.sim import simulate
from dinfer.solve import budget_for_share, make_plan
from dinfer.timeline import Run
from dinfer.trace import Trace

PROMPTS = Path(__file__).parents[1] / "traces" / "prompts" / "prompts.jsonl"
FEW_PROMPTS = (
    "Why is the sky red in the evening and blue at noon?",
    "Suggest three quick breakfasts for a person who leaves the house at six.",
    "Explain to a child how a bicycle stays upright.",
    "Write a short letter that thanks a neighbour for watering the plants.",
    "What is the difference between weather and climate?",
    "Give three reasons why bread rises, in simple words.",
    "Describe how a letter travelled from London to Rome in the year 1700.",
    "Write a function in Python that counts the words of a text.",
)
"""Ours; used where the repository's prompts are not at hand."""

QUESTION = "Why is the sky blue? Answer in three sentences."
CACHES = ("static", "hot_predicted")
OWN = ("trace", "machine.toml", "plan-*", "sim-*", "run-*", "figures", "summary.json")
"""What a demo leaves in its directory, as patterns; a later one replaces these and nothing else."""


def demo(
    out: str | Path,
    tokens: int = 2000,
    *,
    model: str = "smollm2",
    share: float = 0.5,
    sparsity: float = 0.6,
    replayed: int = 96,
    answer: int = 48,
) -> dict[str, Any]:
    """Record ``model``, plan for ``share`` of its neurons, simulate and run the same plans, compare; the summary.

    ``tokens`` decode tokens are recorded at ``sparsity`` (magnitude kinds). The last sequences, about ``replayed``
    decode tokens, are held out: the plans see the others only. ``answer`` tokens are generated at the end.
    The device is CUDA where there is one, else the GPU and its link are emulated on the CPU.
    Raises InputError when ``out`` holds something that no demo left.
    """
    directory = Path(out)
    _take_over(directory)
    summary = _new_summary()
    _write_summary(directory, summary)

    disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with _step(f"fetch {model}"):
        where = resolve_model(model)
    trace = _record(where, directory, tokens, sparsity)
    machine = _profile(where, trace, directory, device)
    summary |= {"machine": machine.name, "emulated": machine.emulated, "model": trace.spec.name}
    seen, held_out = trace.hold_out(replayed)
    for cache in CACHES:
        plan = _plan(seen, machine, cache, share, directory)
        summary["runs"].append(_both(plan, where, held_out, device, share, directory))
        _write_summary(directory, summary)
    table = pd.DataFrame(summary["runs"]).drop(columns="plan")
    print_table(table, title=f"predicted against measured: {trace.spec.name} on {machine.name}")
    print(flush=True)
    _answer(directory / f"plan-{CACHES[-1]}.json", where, device, answer)
    _list_artefacts(directory)
    return summary


def _take_over(directory: Path) -> None:
    # an earlier demo's artefacts go, anything else is refused
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file; give --out a directory")
    if directory.is_dir() and any(directory.iterdir()):
        if not _is_summary(directory / "summary.json"):
            raise InputError(
                f"{directory} is not empty and holds no summary.json of a demo; give --out a new directory"
            )
        for pattern in OWN:
            for path in directory.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "figures").mkdir()


def _is_summary(file: Path) -> bool:
    try:
        return "runs" in json.loads(file.read_text())
    except (OSError, ValueError, TypeError):
        return False


def _new_summary() -> dict[str, Any]:
    packages = ("dinfer", "torch", "transformers", "numba", "numpy")
    return {
        "machine": "",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": sys.version.split()[0], **{name: version(name) for name in packages}},
        "runs": [],
    }


def _write_summary(directory: Path, summary: dict[str, Any]) -> None:
    (directory / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def _record(model: Path, directory: Path, tokens: int, sparsity: float) -> Trace:
    magnitude = load_model(str(model)).sparsity_kind == "magnitude"
    prompts: Any = PROMPTS if PROMPTS.is_file() else FEW_PROMPTS
    with _step(f"record {tokens:,} tokens", directory / "trace"), progress("recording", "tokens") as at:
        sparse = sparsity if magnitude else None
        trace = record(
            model, prompts, tokens, directory / "trace", sparsity=sparse, hidden=True, levels=False, progress=at
        )
    decoded = trace.phase("decode")
    cost = trace.meta["calibration"]
    _say(
        f"  {len(decoded):,} decode tokens of {decoded.tokens['sequence'].nunique()} sequences, "
        f"{decoded.density.mean():.1%} of the neurons active; perplexity {cost['perplexity_dense']:.2f} dense, "
        f"{cost['perplexity_sparse']:.2f} at these thresholds"
    )
    with _step("locality of the trace", directory / "figures/stats.png"):
        plot_stats(stats(trace)).savefig(directory / "figures/stats.png", dpi=150)
    return trace


def _profile(model: Path, trace: Trace, directory: Path, device: str) -> Machine:
    emulated = ", the GPU and its link emulated on the CPU" if device == "cpu" else ""
    with _step(f"profile this machine{emulated}", directory / "machine.toml"), progress("measuring", "%") as at:
        machine, fits = measure_machine(
            model,
            device=device,
            dtype=_dtype(device),
            thresholds=trace.meta["thresholds"] if trace.spec.sparsity_kind == "magnitude" else (),
            progress=lambda done: at(round(100 * done), 100),
        )
    (directory / "machine.toml").write_text(machine_toml(machine, fits, trace.spec.name))
    return machine


def _plan(seen: Trace, machine: Machine, cache: str, share: float, directory: Path) -> Plan:
    spec = seen.spec.with_dtype(_dtype("cpu" if machine.emulated else "cuda"))
    context = 512
    path = directory / f"plan-{cache}.json"
    with _step(f"plan for {share:.0%} of the neurons, cache {cache}", path):
        budget = budget_for_share(spec, machine, share, context)
        plan = make_plan(seen, machine, budget, context=context, cache=cache, spec=spec)
        plan.save(path)
        plot_memory(plan.memory).savefig(directory / f"figures/memory-{cache}.png", dpi=150)
    for line in plan_lines(plan):
        _say(f"  {line}")
    return plan


def _both(plan: Plan, model: Path, held_out: Trace, device: str, share: float, directory: Path) -> dict[str, Any]:
    """Simulate and run ``plan`` on the held-out sequences, compare; the row of the summary."""
    cache, count = plan.cache["name"], len(held_out.phase("decode"))
    with _step(f"simulate {count} held-out tokens", directory / f"sim-{cache}.json"):
        simulated = simulate(plan, held_out)
    with _step(f"run the same {count} tokens", directory / f"run-{cache}.json"):
        with Session(plan, model, device) as session:
            executed = session.replay(held_out)
    for line in summary_lines(run_summary(executed, plan)):
        _say(f"  {line}")
    if not simulated.same_decisions(executed):
        _say("  note: the run's decisions differ from the simulation's")
    _draw(simulated, executed, cache, directory)
    frame = compare(simulated.timeline, executed.timeline)
    print_table(frame, title=f"{cache}: per token")
    print(flush=True)
    speed = frame.set_index("step").loc["tokens_per_second", ["predicted", "measured", "error"]].astype(float)
    return {
        "plan": f"plan-{cache}.json",
        "cache": cache,
        "budget_share": share,
        "predicted_tokens_per_second": speed["predicted"],
        "measured_tokens_per_second": speed["measured"],
        "error": speed["error"],
    }


def _draw(simulated: Run, executed: Run, cache: str, directory: Path) -> None:
    simulated.timeline.save(directory / f"sim-{cache}.json")
    executed.timeline.save(directory / f"run-{cache}.json")
    figures = directory / "figures"
    plot_timeline(simulated.timeline).savefig(figures / f"timeline-sim-{cache}.png", dpi=150)
    plot_timeline(executed.timeline).savefig(figures / f"timeline-run-{cache}.png", dpi=150)
    plot_compare(compare(simulated.timeline, executed.timeline)).savefig(figures / f"compare-{cache}.png", dpi=150)


def _answer(plan_file: Path, model: Path, device: str, tokens: int) -> None:
    plan = Plan.load(plan_file)
    if not any((model / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        _say("no live answer: the model has no tokenizer")
        return
    _say(f"live, by {plan_file.name}: {QUESTION}")
    run = execute(plan, model, QUESTION, device=device, max_tokens=tokens, on_text=_stream)
    print()
    _say(f"  {run.timeline.tokens} tokens at {run.timeline.tokens_per_second:.2f} tok/s")


def _dtype(device: str) -> str:
    return "float32" if device == "cpu" else "float16"


def _list_artefacts(directory: Path) -> None:
    paths = sorted({path for pattern in OWN for path in directory.glob(pattern)} | set(directory.glob("figures/*")))
    _say("\nartefacts:")
    for path in paths:
        if path.name != "figures":
            _say(f"  {path}")


@contextmanager
def _step(text: str, artefact: Path | None = None) -> Iterator[None]:
    _say(f"{text}{f' -> {artefact}' if artefact else ''}")
    begun = time.perf_counter()
    yield
    _say(f"  {time.perf_counter() - begun:.1f} s")


def _stream(piece: str) -> None:
    print(piece, end="", flush=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
