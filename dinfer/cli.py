"""The command line: results on stdout, progress and notes on stderr, exit 2 for bad input.

Heavy imports stand inside the commands, so that ``dinfer --help`` is quick.
"""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dinfer.errors import InputError, PlanWarning
from dinfer.options import note

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


def _refuse(text: str) -> None:
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(2)


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    package = Path(__file__).parent

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if issubclass(category, PlanWarning) or Path(filename).is_relative_to(package):
            note(f"warning: {' '.join(str(message).split())}")
        else:
            usual(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        usual = warnings.showwarning
        warnings.showwarning = show
        warnings.filterwarnings("always", category=PlanWarning)
        warnings.filterwarnings("always", category=UserWarning, module=r"dinfer\.")
        yield


# isort: off
import dinfer.cli_record  # noqa: E402  the commands of these stand on the app, in the order of --help
import dinfer.cli_plan  # noqa: E402
import dinfer.cli_run  # noqa: E402
import dinfer.cli_capacity  # noqa: E402
import dinfer.cli_predict  # noqa: E402, F401
