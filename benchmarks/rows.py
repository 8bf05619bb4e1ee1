"""What all benchmarks share: one row schema, one way to measure, one way to print."""

import csv
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np

OUTPUTS = ("md", "csv", "json")
PACKAGES = ("numpy", "numba", "torch")


class Row(NamedTuple):
    """One figure: the median and the quartiles of ``name`` in ``setting``, in ``unit``.

    ``ratio`` says how many times as fast as ``against``, taken in the same run; None without one.
    """

    name: str
    setting: str
    median: float
    low: float
    high: float
    unit: str
    against: str
    ratio: float | None


Function = Callable[[], object]


def measure_in_turn(functions: Mapping[str, Function], repeat: int) -> dict[str, np.ndarray]:
    """Seconds [repeat] of each function, called one after another so that all see the same load.

    Each is called once beforehand, to compile and to warm up.
    """
    for function in functions.values():
        function()
    seconds = {name: np.empty(repeat) for name in functions}
    for i in range(repeat):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name][i] = time.perf_counter() - start
    return seconds


def spread(samples: np.ndarray) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    low, median, high = np.quantile(samples, [0.25, 0.5, 0.75])
    return float(median), float(low), float(high)


def measure(function: Function, repeat: int) -> tuple[float, float, float]:
    """Median, lower and upper quartile of the seconds that ``function`` takes."""
    return spread(measure_in_turn({"": function}, repeat)[""])


def machine_line() -> str:
    """The machine, the versions and the date, on one line."""
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    today = datetime.date.today().isoformat()
    return (
        f"{_cpu_model()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}; "
        f"Python {platform.python_version()}, {versions}; {today}"
    )


def write(rows: list[Row], output: str) -> None:
    """Print ``rows`` to stdout as md, csv or json; the machine stands above (md) or on stderr."""
    if output == "md":
        print(f"{machine_line()}\n")
        _write_table(rows)
        return
    print(machine_line(), file=sys.stderr)
    if output == "json":
        print(json.dumps([row._asdict() for row in rows], indent=1))
    else:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(rows)


def save(rows: list[Row], path: Path) -> None:
    """Write ``rows`` to ``path`` with .json and with .md in the place of its suffix, the machine above them."""
    document = {"machine": machine_line(), "rows": [row._asdict() for row in rows]}
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    with path.with_suffix(".md").open("w") as file, redirect_stdout(file):
        write(rows, "md")


def _write_table(rows: list[Row]) -> None:
    numbers = [field in ("median", "low", "high", "ratio") for field in Row._fields]
    cells = [Row._fields, *(tuple(map(_text, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = [
        "-" * (width - 1) + (":" if number else "-")
        for width, number in zip(widths, numbers, strict=True)
    ]
    for line in (cells[0], rule, *cells[1:]):
        padded = [
            text.rjust(width) if number else text.ljust(width)
            for text, width, number in zip(line, widths, numbers, strict=True)
        ]
        print(f"| {' | '.join(padded)} |")


def _text(value: str | float | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.3g}"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
