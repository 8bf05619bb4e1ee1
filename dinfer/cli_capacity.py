"""The command that says what runs on a given GPU, and how fast."""

from dataclasses import replace
from typing import Annotated

import typer

from dinfer.cli import Form, app
from dinfer.errors import InputError
from dinfer.options import names, note


@app.command(epilog="Example: dinfer capacity --gpu rtx4090 --ram 64GiB --target 10")
def capacity(
    gpu: Annotated[str, typer.Option(help="catalogue machine or a .toml file that profile wrote", show_default=False)],
    ram: Annotated[
        str | None, typer.Option(help="host memory, 64GiB say; default: the machine's", show_default=False)
    ] = None,
    target: Annotated[float | None, typer.Option(help="tokens/s that are wanted", show_default=False)] = None,
    model: Annotated[
        str, typer.Option(help="catalogue models, with commas; default: all", show_default=False)
    ] = "",
    dtypes: Annotated[str, typer.Option(help="precisions to try, the best first")] = "float16,int8,int4",
    context: Annotated[int, typer.Option(help="tokens that the KV cache holds")] = 512,
    output: Form = None,
) -> None:
    """Which models of the catalogue run on a GPU, how fast, and what holds them up: simulated, no model runs."""
    from dinfer.capacity import capacity as find_capacity
    from dinfer.capacity import for_reading
    from dinfer.machine import load_machine
    from dinfer.report import print_table, progress
    from dinfer.units import format_bytes, parse_bytes

    machine = load_machine(gpu)
    if ram is not None:
        memory_bytes = parse_bytes(ram)
        if not memory_bytes:
            raise InputError(f"ram is {ram}; it must be above 0, 64GiB say")
        machine = replace(machine, cpu=replace(machine.cpu, memory_bytes=memory_bytes))
    with progress("simulating", "models") as at:
        frame = find_capacity(machine, names(model), target=target, context=context, dtypes=names(dtypes), tell=at)
    memory = f"{format_bytes(machine.gpu.memory_bytes)} and {format_bytes(machine.cpu.memory_bytes)} of RAM"
    print_table(frame if output else for_reading(frame), output, title=f"{machine.gpu.name}, {memory}")
    note("synthetic: activity is drawn from published statistics, speeds are simulated with the machine's figures")
