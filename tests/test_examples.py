"""What the README and the help tell people to type exists; the demo does what it says."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from dinfer.cli import app

REPOSITORY = Path(__file__).parents[1]


def command_lines() -> list[str]:
    """Each ``dinfer ...`` line in a code block of the README, continued lines joined; and the examples of the help."""
    text = (REPOSITORY / "README.md").read_text("utf-8")
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    joined = re.sub(r"\\\n\s*", "", blocks)
    lines = [line.split("#")[0].strip() for line in joined.splitlines() if re.match(r"\s*dinfer ", line)]
    examples = [command.epilog.removeprefix("Example: ") for command in app.registered_commands]
    return [*lines, *examples]


def parses(line: str) -> str:
    """The command that ``line`` calls; click parses all of it, nothing is run."""
    group = typer.main.get_command(app)
    name, *arguments = shlex.split(line)[1:]
    command = group.commands[name]
    command.make_context(name, arguments, resilient_parsing=False).close()
    return name


@pytest.mark.parametrize("line", command_lines())
def test_command_lines_of_the_readme_and_the_help_parse(line):
    assert line.startswith("dinfer ")
    assert parses(line)


def test_the_readme_shows_every_command():
    text = (REPOSITORY / "README.md").read_text("utf-8")
    names = [command.callback.__name__.replace("_", "-") for command in app.registered_commands]
    assert [name for name in names if f"dinfer {name}" not in text] == []


def test_an_unknown_option_would_be_found():
    with pytest.raises(Exception, match="No such option"):
        parses("dinfer stats out/trace --colour")


def test_the_readme_links_to_files_that_exist():
    text = (REPOSITORY / "README.md").read_text("utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert links
    assert [link for link in links if not (REPOSITORY / link).exists()] == []


@pytest.mark.slow
def test_the_demo_leaves_its_artefacts(smollm2, tmp_path, capsys):
    from dinfer.demo import demo

    out = tmp_path / "demo"
    summary = demo(out, tokens=80, replayed=16, answer=8)
    assert json.loads((out / "summary.json").read_text()) == summary
    assert [run["cache"] for run in summary["runs"]] == ["static", "hot_predicted"]
    assert set(summary["runs"][0]) == {
        "plan", "cache", "budget_share", "predicted_tokens_per_second", "measured_tokens_per_second", "error",
    }  # fmt: skip
    for run in summary["runs"]:
        cache = run["cache"]
        assert run["measured_tokens_per_second"] > 0
        names = [f"plan-{cache}.json", f"sim-{cache}.json", f"run-{cache}.json", f"figures/compare-{cache}.png"]
        names += [f"figures/timeline-{side}-{cache}.png" for side in ("sim", "run")]
        assert [name for name in names if not (out / name).is_file()] == []
    assert (out / "machine.toml").is_file()
    assert (out / "trace" / "meta.json").is_file()
    said, notes = capsys.readouterr()
    assert "tokens_per_second" in said
    assert f"-> {out / 'trace'}" in notes

    (out / "mine.txt").write_text("mine")
    from dinfer.demo import _take_over

    _take_over(out)
    assert sorted(path.name for path in out.iterdir()) == ["figures", "mine.txt"]
