"""The commands about predictors: train one from a trace, and say how good it is and whether it is worth its bytes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dinfer.cli import Force, Form, TraceArgument, app
from dinfer.errors import InputError
from dinfer.options import names, note

if TYPE_CHECKING:
    import numpy as np

    from dinfer.predictors import Predictors
    from dinfer.trace import Trace


@app.command(
    epilog="Example: dinfer train-predictor out/trace --hold-out coding,travel --choose maths,language -o out/predictor"
)
def train_predictor(
    trace: TraceArgument,
    out: Annotated[Path, typer.Option("-o", "--output", help="directory of the predictor; an unfinished one goes on")],
    lookahead: Annotated[int, typer.Option(help="layers ahead that it predicts; 0 for a layer's own residual")] = 1,
    share: Annotated[float, typer.Option(help="of the FFN's bytes that it may take")] = 0.08,
    bound: Annotated[float, typer.Option(help="most of a layer's output norm that its threshold may miss")] = 0.05,
    hold_out: Annotated[
        str, typer.Option(help="domains of prompts, with commas, kept for the test", show_default=False)
    ] = "",
    choose: Annotated[
        str,
        typer.Option(
            help="domains, with commas, that it is not trained on either and that set its thresholds; default: prompts "
            "of learnt domains, by which it misses more than --bound on others",
            show_default=False,
        ),
    ] = "",
    epochs: Annotated[int, typer.Option(help="at most so many passes; a layer that gets no better stops")] = 6,
    seed: Annotated[int, typer.Option(help="of the order of the tokens")] = 0,
    bits: Annotated[int, typer.Option(help="of a stored weight, 8 or 16; 8 give twice the rank")] = 8,
    force: Force = False,
) -> None:
    """Train a low-rank predictor for each layer on a trace with residuals (record --hidden)."""
    from dinfer.record.predictor import Settings, train
    from dinfer.report import predictor_lines, progress
    from dinfer.trace import Trace

    settings = Settings(lookahead, share, bound, names(hold_out), names(choose), epochs, seed=seed, bits=bits)
    read = Trace.load(trace)
    if force:
        _remove(out)
    with progress("training", "batches") as at:
        trained = train(read, out, settings, at)
    print("\n".join(predictor_lines(trained)))
    note(f"predictor in {out}")


@app.command(epilog="Example: dinfer eval-predictor out/trace --predictor out/predictor --model smollm2 -o md")
def eval_predictor(
    trace: TraceArgument,
    predictor: Annotated[Path, typer.Option(help="directory of the predictor")],
    domains: Annotated[
        str, typer.Option(help="of the prompts to judge by; default: those it was not trained on", show_default=False)
    ] = "",
    model: Annotated[
        str | None, typer.Option(help="also the perplexity of this model, exact and predicted", show_default=False)
    ] = None,
    calibration: Annotated[bool, typer.Option("--calibration", help="the calibration curve instead")] = False,
    tokens: Annotated[int, typer.Option(help="at most so many tokens, evenly spread")] = 4096,
    output: Form = None,
) -> None:
    """Judge a predictor layer by layer beside a static hot set, the previous token's set and an oracle."""
    from dinfer.predictors import Predictors
    from dinfer.record.judge import advice, evaluate, frequency_of, modes, of_domains, split, ways
    from dinfer.record.judge import calibration as calibration_curve
    from dinfer.record.predictor_data import spread
    from dinfer.report import print_table, progress
    from dinfer.trace import Trace

    if tokens < 1:
        raise InputError(f"tokens is {tokens}; it must be at least 1")
    used, read = Trace.load(trace), Predictors.load(predictor)
    held, choose = (tuple(read.training.get(name, ())) for name in ("hold_out", "choose"))
    known = used.meta.get("domains", ())
    learnt, tested = split(used, tuple(n for n in held + choose if n in known)), names(domains) or held
    test = of_domains(used, tested) if tested else learnt.validation
    rows = spread(test, tokens)
    with progress("judging", "tokens") as at:
        curves = ways(read, used, rows, frequency_of(used, learnt.train), at)
    if calibration:
        print_table(calibration_curve(curves["trained"]), output)
        return
    frame = evaluate(read, curves)
    print_table(frame, output)
    judged = ", ".join(tested) or "prompts that stopped the training"
    note(f"judged on {len(rows)} tokens of {judged}")
    note(advice(modes(frame, read)))
    if model is not None:
        _print_perplexities(read, model, used, test)


def _print_perplexities(predictors: "Predictors", model: str, trace: "Trace", rows: "np.ndarray") -> None:
    from dinfer.record.fetch import resolve_model
    from dinfer.record.generate import load
    from dinfer.record.restricted import perplexities, texts_of

    loaded = load(resolve_model(model))
    predictors.check_model(loaded.spec, loaded.checkpoint.fingerprint)
    found = perplexities(loaded, predictors, texts_of(trace, rows, PERPLEXITY_TEXTS)).iloc[0]
    note(
        f"perplexity of {int(found['texts'])} texts: {found['exact_perplexity']:.2f} exact, "
        f"{found['predicted_perplexity']:.2f} predicted "
        f"({found['ratio']:.3f} times); FFN output error {found['output_error']:.1%}"
    )


PERPLEXITY_TEXTS = 32


def _remove(out: Path) -> None:
    """Remove a predictor or an unfinished training at ``out``, and nothing else."""
    import shutil

    if not out.exists():
        return
    if not (out / "predictor.json").is_file() and not (out / "training").is_dir() and any(out.iterdir()):
        raise InputError(f"{out} is no predictor; only a predictor is ever replaced, choose another -o")
    shutil.rmtree(out)
