"""What ``kernels.py --save`` keeps, and the page made of it: a column a sparsity, a line a dtype and threads."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rows import Row, machine_line

HEAD = """# The CPU's FFN kernel

{machine}

A layer of ReluLLaMA-7B (hidden 4096, 11,008 neurons), weights rotating over 2 GiB; `python benchmarks/kernels.py`, on a
quiet machine. Median time, and the speed as a share of a pure read of the same rows in the same run. Neurons are
predicted, or told active by their gates (exact).
"""
PORTABLE = """
## Without AVX-512

As above with `NUMBA_CPU_NAME={cpu} NUMBA_CPU_FEATURES=` and `--quick`: compiled for AVX2, both the kernel and the read.
"""
PEERS = """
How many times as fast as a dense FFN on as many threads, of torch (which has none in groups of 32) and of ggml (Q8_0
for int8, Q4_0 for int4; it rounds x to 8 bits for both, and to the weights' type for 16-bit floats):
"""


def save(found: list[Row], dtypes: list[str], cpu: str, path: Path) -> None:
    """Put the rows of ``dtypes``, compiled for ``cpu``, in the place of those in ``path`` (JSON), and its .md."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    others = [row for row in kept.get(cpu, {}).get("rows", []) if row["setting"].split(",")[0] not in dtypes]
    kept[cpu] = {"machine": machine_line(), "rows": others + [row._asdict() for row in found]}
    path.write_text(json.dumps(kept, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(kept))


def page(kept: dict[str, Any]) -> str:
    """The page of all that is kept: "native" first, then what was compiled for another CPU."""
    lines: list[str] = []
    for cpu, one in sorted(kept.items(), key=lambda item: item[0] != "native"):
        lines += [(HEAD if cpu == "native" else PORTABLE).format(machine=one["machine"], cpu=cpu)]
        reads = {}
        for row in one["rows"]:
            if row["against"] == "pure read":
                reads[_place(row)] = f"{row['median']:.2f} ms, {row['ratio']:.2f}"
        lines += _table(reads)
        if cpu == "native":
            lines += [PEERS, *_table(_peers(one["rows"]))]
    return "\n".join(lines) + "\n"


def _peers(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str], str]:
    """A peer's own time and how many times as fast the kernel is; "unmeasured" where a peer's time is missing."""
    cells = {}
    for peer in ("torch dense", "ggml dense"):
        for row in rows:
            name, threads, column = _place(row)
            if peer == "torch dense" and name in ("int8", "int4"):
                continue
            line = (f"{name}, {peer}", threads)
            if row["against"] == "pure read" and "exact" not in column:
                cells.setdefault((*line, "dense"), "unmeasured")
            if row["name"] == peer:
                cells[*line, "dense"] = f"{row['median']:.1f} ms"
            if row["against"] == peer:
                cells[*line, column] = f"{row['ratio']:.3g}x"
    return cells


def _place(row: dict[str, Any]) -> tuple[str, str, str]:
    """dtype, threads and column of a row, of its setting: "int8, 2 threads, 80% sparse, exact"."""
    name, threads, *rest = row["setting"].split(", ")
    return name, threads.split()[0], re.sub(" sparse", "", ", ".join(rest))


def _table(cells: dict[tuple[str, str, str], str]) -> Iterator[str]:
    """A Markdown table of (name, threads, column) -> text, both in the order of appearance."""
    columns = list(dict.fromkeys(column for _, _, column in cells))
    yield f"| weights | threads | {' | '.join(columns)} |"
    yield f"|---|--:|{'--:|' * len(columns)}"
    for name, threads in dict.fromkeys((name, threads) for name, threads, _ in cells):
        yield f"| {name} | {threads} | {' | '.join(cells.get((name, threads, column), '') for column in columns)} |"
