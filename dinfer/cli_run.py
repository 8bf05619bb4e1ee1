"""The commands that run a plan, compare it with what was predicted, and measure a machine."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dinfer.chat import converse
from dinfer.cli import Force, Form, PredictorOption, Sequences, app
from dinfer.errors import InputError
from dinfer.options import (
    check_what_to_run,
    free_file,
    note,
    parse_link,
    predictor_of,
    save_timeline,
    selected,
    thresholds_of,
)


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
        note(f"replaying {len(replayed.phase('decode'))} tokens")
    from dinfer.exec import Conversation, Session
    from dinfer.exec.execute import open_device
    from dinfer.record.fetch import resolve_model
    from dinfer.report import print_run, run_summary

    open_device(device)
    streams = output is None and len(prompts) == 1
    how: dict[str, Any] = {"costs": costs, "prefill": prefill, "predictor": predictor_of(predictor)}
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
    save_timeline(done.timeline, timeline)
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

    read, words, trained = Plan.load(plan), read_text(text), predictor_of(predictor)
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
        note(f"both timelines in {timeline}; open it in ui.perfetto.dev")
    if figure is not None:
        from dinfer.plot import plot_compare

        plot_compare(frame).savefig(figure, dpi=150)
        note(f"figure in {figure}")
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
    note(f"machine in {out}{': the GPU and its link are emulated' if machine.emulated else ''}")


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


def _stream(piece: str) -> None:
    print(piece, end="", flush=True)
