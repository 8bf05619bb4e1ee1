"""Each benchmark runs on a tiny shape and prints the shared row schema in every format."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dinfer.record.recorder import record

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FIELDS = ["name", "setting", "median", "low", "high", "unit", "against", "ratio"]
SMALL = ["--quick", "--dtype", "bfloat16", "--hidden", "256", "--neurons", "512", "--gib", "0.01"]
SHORT = ["--quick", "--layers", "2", "--neurons", "200", "--tokens", "8"]
DECODE = ["--case", "MODEL", "--dtypes", "float32", "--systems", "transformers", "--steps", "10", "--repeat", "1"]
DECODE += ["--gib", "0.05"]
TINY = {"kernels.py": SMALL, "policies.py": ["--quick"], "replay.py": SHORT}


def run(script: str, output: str) -> tuple[str, str]:
    command = [sys.executable, BENCHMARKS / script, "-o", output, *TINY[script]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def table(text: str) -> list[dict[str, str]]:
    """The rows of a Markdown table."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(set(rule) <= set("-:") for rule in cells[1])
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def read(text: str, output: str) -> list[dict[str, str]]:
    """Rows of the printed text, each value as text; a missing ratio is empty."""
    if output == "md":
        return table(text)
    if output == "csv":
        return list(csv.DictReader(io.StringIO(text)))
    return [{k: "" if v is None else str(v) for k, v in row.items()} for row in json.loads(text)]


@pytest.mark.parametrize("output", ["md", "csv", "json"])
@pytest.mark.parametrize("script", sorted(TINY))
def test_rows_have_the_schema(script, output):
    check(*run(script, output), output)


@pytest.mark.slow
def test_decoding_is_compared_with_a_peer_that_writes_the_same(tiny_models, tmp_path):
    # the script ends with an error where dinfer and transformers do not begin with the same 8 tokens
    model, saved = tiny_models["llama-relu"], tmp_path / "decode.json"
    TINY["decode.py"] = [str(model) if word == "MODEL" else word for word in DECODE] + ["--save", str(saved)]
    text, errors = run("decode.py", "md")
    rows = check(text, errors, "md")
    assert [row["against"] for row in rows if row["name"] == "dinfer sparse"][1:] == ["transformers"]
    kept = json.loads(saved.read_text())["llama-relu, float32"]["systems"]
    assert kept["dinfer sparse"]["equal_tokens"] == 11
    assert 0 < kept["dinfer sparse"]["active_share"] < 1
    assert kept["dinfer sparse"]["bytes_a_token"] < kept["transformers"]["bytes_a_token"]
    assert "| transformers |" in saved.with_suffix(".md").read_text()


def test_predicted_is_kept_beside_measured(tiny_models, tmp_path):
    """A row a plan, and in the file what each profile said, step by step; the errors are those of its own figures."""
    model, saved = tiny_models["llama-relu"], tmp_path / "predicted.json"
    trace = record(model, [[1, 2, 3], [4, 5, 6]], tokens=24, out=tmp_path / "trace", max_new_tokens=12, levels=False)
    assert len(trace.phase("decode")) == 24
    options = ["--model", model, "--trace", tmp_path / "trace", "--budgets", "40", "--tokens", "8", "--repeat", "2"]
    TINY["predicted.py"] = [*map(str, options), "--save", str(saved)]
    text, errors = run("predicted.py", "md")
    assert [row["name"] for row in check(text, errors, "md")] == ["static", "hot_predicted"]
    assert errors.count("profiling in float32") == 2
    for plan in json.loads(saved.read_text())["plans"]:
        ratio = plan["predicted_tokens_per_second"] / plan["measured_tokens_per_second"]
        assert plan["error"] == pytest.approx(ratio - 1)
        assert plan["error_by_first_profile"] > -1
        assert all(min(step) >= 0 for step in plan["step_milliseconds"].values())
        assert min(plan["step_milliseconds"]["attention"]) > 0


def check(text: str, errors: str, output: str) -> list[dict[str, str]]:
    """The rows of what was printed, each as the schema has it."""
    rows = read(text, output)
    assert rows
    for row in rows:
        assert list(row) == FIELDS
        assert row["name"]
        assert row["unit"]
        assert 0 < float(row["low"]) <= float(row["median"]) <= float(row["high"])
        assert (row["ratio"] == "") == (row["against"] == "")
        assert row["ratio"] == "" or float(row["ratio"]) > 0
    heading = text if output == "md" else errors
    assert "numba" in heading
    assert "cores" in heading
    return rows


def test_the_page_of_the_kernels_keeps_other_dtypes_and_says_what_is_unmeasured(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from kernels_table import save
    from rows import Row

    def rows(dtype, ms):
        read = Row("ffn_cpu", f"{dtype}, 1 thread, 90% sparse", ms, ms, ms, "ms", "pure read", 0.5)
        return [Row("torch dense", f"{dtype}, 1 thread", 9.0, 9.0, 9.0, "ms", "", None), read, torch_row(read)]

    def torch_row(row):
        return row._replace(against="torch dense", ratio=3.0)

    path = tmp_path / "kernels.json"
    save(rows("float32", 3.0) + rows("float16", 1.0), ["float32", "float16"], "native", path)
    save(rows("float16", 2.0), ["float16"], "native", path)
    save(rows("float32", 4.0), ["float32"], "x86-64-v3", path)
    lines = [line for line in path.with_suffix(".md").read_text().splitlines() if line.startswith("| float")]
    assert lines == [
        "| float32 | 1 | 3.00 ms, 0.50 |",
        "| float16 | 1 | 2.00 ms, 0.50 |",
        "| float32, torch dense | 1 | 9.0 ms | 3x |",
        "| float16, torch dense | 1 | 9.0 ms | 3x |",
        "| float32, ggml dense | 1 | unmeasured |  |",
        "| float16, ggml dense | 1 | unmeasured |  |",
        "| float32 | 1 | 4.00 ms, 0.50 |",
    ]


def test_the_tables_of_the_policies_are_those_that_were_measured(monkeypatch):
    """Changed results change their cells and nothing else; a table that the page lacks is named."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from policies_tables import read as saved
    from policies_tables import rewritten

    page = (BENCHMARKS.parent / "docs" / "policies.md").read_text()
    results = saved(BENCHMARKS / "results" / "policies.json")
    assert rewritten(page, results) == page
    first = next(r for r in results["policies"] if (r["model"], r["cache"]) == ("relullama-7b", "time_saved"))
    first["tokens_per_second"] *= 2
    changed = rewritten(page, results).split("\n")
    assert len(changed) == len(page.split("\n"))
    differ = [line for line, was in zip(changed, page.split("\n"), strict=True) if line != was]
    assert [line.split(" | ")[0] for line in differ] == ["| relullama-7b"] * 2  # of the speeds and of all policies
    with pytest.raises(ValueError, match=r"the page has no table \| precision \|"):
        rewritten(page.replace("| precision | ", "| exactness | "), results)
