"""The commands that plan and predict."""

from pathlib import Path
from typing import Annotated

import typer

from dinfer.cli import Force, Form, MachineName, PredictorOption, Sequences, TraceArgument, app
from dinfer.errors import InputError
from dinfer.options import free_file, note, parse_budget, predictor_of, save_timeline, selected


@app.command(epilog="Example: dinfer plan out/trace --machine pc-high --vram 50% --cache static -o out/plan.json")
def plan(
    trace: TraceArgument,
    machine: MachineName,
    vram: Annotated[str, typer.Option(help="budget of GPU memory: 8GiB, or 50% to hold half of all neurons")],
    out: Annotated[Path, typer.Option("-o", "--output", help="new plan file, .json")],
    context: Annotated[int, typer.Option(help="tokens that the KV cache holds")] = 512,
    batch: Annotated[int, typer.Option(help="sequences decoded together, 1 to 8")] = 1,
    solver: Annotated[str, typer.Option(help="greedy or ilp")] = "greedy",
    cache: Annotated[
        str, typer.Option(help="static, lru, lfu, s3fifo, random, hot_predicted, time_saved or belady")
    ] = "hot_predicted",
    lookahead: Annotated[int, typer.Option(help="layers ahead that a prefetch is started")] = 1,
    window: Annotated[
        int | None, typer.Option(help="most neurons that a prefetch moves; default: sized from the time left")
    ] = None,
    activation: Annotated[str, typer.Option(help="exact or predicted")] = "exact",
    prediction: Annotated[str, typer.Option(help="previous or oracle; with --predictor: trained")] = "previous",
    predictor: PredictorOption = None,
    early: Annotated[
        str,
        typer.Option(
            help="what becomes of the first layers, which no predictor sees ahead: predicted (k = 0) or resident"
        ),
    ] = "predicted",
    threshold: Annotated[
        str, typer.Option(help="fixed, or balanced: lower on the GPU, higher on the CPU, the error kept")
    ] = "fixed",
    issue: Annotated[
        str | None, typer.Option(help="how a prefetch moves: copy, block or gather; the default is what runs here")
    ] = None,
    group: Annotated[int, typer.Option(help="neurons that one copy moves, 1 to 64, where issue is copy")] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="of the weights: float32, float16, bfloat16, int8 or int4; default: the trace's", show_default=False
        ),
    ] = None,
    sequences: Sequences = None,
    force: Force = False,
) -> None:
    """Choose the neurons that live on the GPU and the rules by which they move."""
    if out.suffix != ".json":
        raise InputError(f"plan file {out} must end in .json")
    free_file(out, force)
    free_file(out.with_suffix(".safetensors"), force)
    from dinfer.machine import load_machine
    from dinfer.report import memory_table, plan_lines, print_table
    from dinfer.solve import make_plan
    from dinfer.trace import Trace

    used = selected(Trace.load(trace), sequences)
    where = load_machine(machine)
    spec = used.spec.as_run(dtype) if dtype else used.spec
    made = make_plan(
        used, where, parse_budget(vram, spec, where, context, batch), context=context, batch=batch, solver=solver,
        cache=cache, lookahead=lookahead, window=window, activation=activation, prediction=prediction,
        threshold=threshold, issue=issue, group=group, spec=spec, predictor=predictor_of(predictor),
        early=early,
    )  # fmt: skip
    made.save(out)
    print_table(memory_table(made.memory), title=f"GPU memory of {made.spec.name} on {made.machine.name}")
    print("\n".join(plan_lines(made)))
    note(f"plan in {out} and {out.with_suffix('.safetensors')}")


@app.command(epilog="Example: dinfer show out/plan.json")
def show(
    plan: Annotated[Path, typer.Argument(help="plan file", show_default=False)],
    output: Form = None,
) -> None:
    """What a plan says: memory, rules, which layers are not predicted ahead and why, and each layer's row."""
    from dinfer.plan import Plan
    from dinfer.report import layers_table, memory_table, plan_lines, print_table

    read = Plan.load(plan)
    if output is None:
        print_table(memory_table(read.memory), title=f"GPU memory of {read.spec.name} on {read.machine.name}")
        print("\n".join(plan_lines(read)) + "\n")
    print_table(layers_table(read), output, title=f"layers of {read.spec.name}")


@app.command(epilog="Example: dinfer simulate out/plan.json --trace out/trace --timeline out/sim.json")
def simulate(
    plan: Annotated[Path, typer.Argument(help="plan file", show_default=False)],
    trace: Annotated[Path, typer.Option(help="trace directory to replay")],
    machine: Annotated[
        str | None, typer.Option(help="machine with the true costs; default: the plan's", show_default=False)
    ] = None,
    predictor: PredictorOption = None,
    believed: Annotated[
        Path | None, typer.Option(help="decide by the costs that the run of this timeline believed", show_default=False)
    ] = None,
    sequences: Sequences = None,
    timeline: Annotated[
        Path | None, typer.Option(help="write what happened when: .json for Perfetto", show_default=False)
    ] = None,
    output: Form = None,
    force: Force = False,
) -> None:
    """Predict a run: replay a trace under a plan without the model."""
    if timeline is not None:
        free_file(timeline, force)
    from dinfer.machine import load_machine
    from dinfer.plan import Plan
    from dinfer.report import print_run, run_summary
    from dinfer.sim import simulate as simulate_run
    from dinfer.sim.predictor import Predictor
    from dinfer.timeline import Timeline
    from dinfer.trace import Trace

    read, trained = Plan.load(plan), predictor_of(predictor)
    read.check_predictor(None if trained is None else trained.fingerprint())
    where = load_machine(machine) if machine else None
    used = selected(Trace.load(trace), sequences)
    said = None if trained is None else Predictor(trained.predict(used.phase("decode")), trained.rank)
    told = None if believed is None else Timeline.load(believed).believed
    run = simulate_run(read, used, where, predictor=said, believed=told)
    save_timeline(run.timeline, timeline)
    print_run(run_summary(run, read), output)


@app.command(epilog="Example: dinfer sweep out/trace --machine pc-high --vram 6GiB-24GiB+1GiB --jobs 2 -o csv")
def sweep(
    trace: TraceArgument,
    machine: MachineName,
    vram: Annotated[str, typer.Option(help="budgets: 6GiB-24GiB+1GiB is a range and its step")],
    system: Annotated[
        str, typer.Option(help="systems, with commas")
    ] = "transformers,llama.cpp,powerinfer,dynamicinfer,oracle",
    context: Annotated[int, typer.Option(help="tokens that the KV cache holds")] = 512,
    recall: Annotated[float, typer.Option(help="of the predictor, which costs nothing when perfect")] = 1.0,
    precision: Annotated[float, typer.Option(help="of the predictor")] = 1.0,
    jobs: Annotated[int, typer.Option(help="processes")] = 1,
    dask: Annotated[str | None, typer.Option(help="address of a Dask scheduler", show_default=False)] = None,
    sequences: Sequences = None,
    output: Form = None,
) -> None:
    """Replay a trace on each system for each budget of GPU memory."""
    from dinfer.machine import load_machine
    from dinfer.report import print_table, progress
    from dinfer.sweep import Job, offline_profile, parse_grid
    from dinfer.sweep import sweep as sweep_grid
    from dinfer.systems import PREDICTOR_SHARE, predict
    from dinfer.trace import Trace

    used = selected(Trace.load(trace), sequences)
    poor = recall < 1 or precision < 1
    job = Job(
        used, load_machine(machine), context, offline_profile(used),
        predict(used, recall, precision, PREDICTOR_SHARE) if poor else None,
    )  # fmt: skip
    names = [name.strip() for name in system.split(",") if name.strip()]
    with progress("sweeping", "cells") as at:
        frame = sweep_grid(job, parse_grid(vram), names, jobs, dask, at)
    print_table(frame, output, title=f"{used.spec.name} on {job.machine.name}")


@app.command(epilog="Example: dinfer reproduce -o json")
def reproduce(
    tokens: Annotated[int, typer.Option(help="decode tokens simulated of each model")] = 256,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="fit the constants anew and print them")] = False,
    output: Form = None,
) -> None:
    """The paper's tables, ours beside them, with the error."""
    from dinfer import reproduce as tables
    from dinfer.report import print_tables, progress

    if calibrate:
        from dinfer import reproduce_fit

        print(reproduce_fit.constants_toml(reproduce_fit.calibrate(tokens=tokens)), end="")
        return
    with progress("reproducing", "tables") as at:
        made = tables.reproduce(tokens, tell=at)
    print_tables(made, output, tables.TITLES)
    for line in tables.UNEXPLAINED:
        note(line)
