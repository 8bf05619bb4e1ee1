"""The house rules of docs/DESIGN.md that a machine can check."""

import ast
import importlib
import json
import pkgutil
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "dinfer"

GROUND = """
model machine units errors bits document catalog compiled trace archive placement plan predictors timeline policies
""".split()
ROOMS = {  # room: the other rooms that it may import
    "record": {"families"},
    "solve": set(),
    "sim": set(),
    "exec": {"families"},
    "families": set(),
}
ROOF = (
    "chat compare plot report cli cli_record cli_plan cli_run cli_capacity cli_predict capacity demo doctor options "
    "systems sweep reproduce reproduce_fit lm_eval __init__"
).split()
HEAVY = {"torch", "pulp", "matplotlib"}
FORBIDDEN = dict.fromkeys(GROUND, HEAVY) | {"sim": {"torch"}}


def modules(package: Path) -> Iterator[tuple[str, str, ast.Module]]:
    """Floor or room, dotted name and syntax tree of each module under ``package``."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        yield parts[1], ".".join(parts), ast.parse(path.read_text("utf-8"), str(path))


def imports(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted target of each import in module ``name``, within functions too.

    ``from a import b`` gives ``a.b``, whether ``b`` is a module or not.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                # Level 1 is the folder of the module: "a.b.__init__" and "a.b.c" both lie in "a.b".
                base = name.split(".")[:-level] if level else []
                prefix = ".".join([*base, module] if module else base)
                yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(target)), *_],
            ):
                yield node.lineno, target


def may_import(importer: str, imported: str) -> bool:
    """Whether ``importer`` may import ``imported``; each is a floor's module or a room."""
    if importer == imported or importer in ROOF:
        return True
    if importer in ROOMS:
        return imported in GROUND or imported in ROOMS[importer]
    return imported in GROUND


def violations(package: Path) -> list[str]:
    """One line for each import in ``package`` that breaks the house rules."""
    found = []
    for part, name, tree in modules(package):
        if part not in [*GROUND, *ROOMS, *ROOF]:
            found.append(f"{name} is on no floor: name it in GROUND, ROOMS or ROOF")
            continue
        for line, target in imports(name, tree):
            head, *rest = target.split(".")
            where = f"{name}:{line} imports {target}"
            if head in FORBIDDEN.get(part, ()):
                found.append(f"{where}: {part} must not load {head}")
            if head != package.name:
                continue
            # A name that is no floor's module is taken from the package itself, which is roof.
            imported = rest[0] if rest and rest[0] in [*GROUND, *ROOMS, *ROOF] else "__init__"
            if not may_import(part, imported):
                found.append(f"{where}: {part} must not import {imported}")
        found += [
            f"{name}:{node.lineno} imports a module as exec: hides the builtin"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            and any((alias.asname or alias.name) == "exec" for alias in node.names)
        ]
    return found


def test_imports_go_down_only():
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("module", "source", "broken"),
    [
        ("plan", "import dinfer.sim", "plan must not import sim"),
        ("plan", "from dinfer.sim.engine import run", "plan must not import sim"),
        ("plan", "from .sim import engine", "plan must not import sim"),
        ("plan", "from . import sim", "plan must not import sim"),
        ("plan", "from . import report", "plan must not import report"),
        ("plan", "def f():\n    from dinfer import compare", "plan must not import compare"),
        ("plan", "from dinfer import Plan", "plan must not import __init__"),
        ("plan", "import dinfer", "plan must not import __init__"),
        ("plan", "def f():\n    import torch.nn", "plan must not load torch"),
        ("policies/lru", "from pulp import LpProblem", "policies must not load pulp"),
        ("trace", "import matplotlib.pyplot as plt", "trace must not load matplotlib"),
        ("sim/decode", "from ..exec.bank import Bank", "sim must not import exec"),
        ("sim/decode", "from .. import exec", "sim must not import exec"),
        ("sim/decode", "from .. import families", "sim must not import families"),
        ("sim/__init__", "from ..record import hooks", "sim must not import record"),
        ("sim/__init__", "import torch", "sim must not load torch"),
        ("exec/decode", "__import__('dinfer.sim')", "exec must not import sim"),
        ("exec/decode", "importlib.import_module('dinfer.sim')", "exec must not import sim"),
        ("solve/ilp", "from dinfer.families import llama", "solve must not import families"),
        ("families/opt", "from dinfer import record", "families must not import record"),
        ("cli", "from dinfer import exec", "hides the builtin"),
        ("utils", "import numpy", "dinfer.utils is on no floor"),
    ],
)
def test_a_broken_import_rule_is_found(tmp_path, module, source, broken):
    path = tmp_path / "dinfer" / f"{module}.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    found = violations(tmp_path / "dinfer")
    assert any(broken in line for line in found), found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("plan", "from dinfer import bits\nfrom .errors import InputError\nimport numba"),
        ("policies/lru", "from ..bits import pack\nfrom . import lfu\nfrom .lfu import step"),
        ("policies/__init__", "from .lru import Lru\nfrom dinfer.policies import lfu"),
        ("sim/decode", "from . import engine\nfrom dinfer.plan import Plan"),
        ("record/hooks", "import torch\nfrom dinfer.families import llama\nfrom .. import trace"),
        ("exec/bank", "import torch\nfrom ..families import llama"),
        ("cli", "from dinfer import compare, sim\nfrom dinfer.exec.decode import execute"),
        ("__init__", "from .plan import Plan\nimportlib.import_module('dinfer.exec')"),
    ],
)
def test_a_kept_import_rule_passes(tmp_path, module, source):
    path = tmp_path / "dinfer" / f"{module}.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert violations(tmp_path / "dinfer") == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [("dinfer", HEAVY | {"numba"}), ("dinfer.sim", HEAVY)],
)
def test_import_leaves_the_heavy_packages_alone(module, absent):
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    loaded = set(json.loads(run.stdout))
    assert module in loaded
    assert absent & loaded == set()


def test_all_is_sorted_and_complete():
    dinfer = importlib.import_module("dinfer")
    exported = dinfer.__all__
    assert list(exported) == sorted(set(exported))
    values = {name: getattr(dinfer, name) for name in exported}

    reachable = {name for name in {*dir(dinfer), *vars(dinfer)} if not name.startswith("_")}
    named = {n for n in reachable if not isinstance(getattr(dinfer, n), types.ModuleType)}
    assert named - {"TYPE_CHECKING"} - set(exported) == set()

    # Importing a submodule binds its name in the package: an export of that name would change.
    submodules = {found.name for found in pkgutil.iter_modules(dinfer.__path__)}
    taken = {n for n in submodules & set(exported) if not isinstance(values[n], types.ModuleType)}
    assert taken == set()


def undocumented(package: Path) -> list[str]:
    """Public functions and classes at the top of the modules in ``package`` without docstring."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [
        f"{name}.{node.name}"
        for _, name, tree in modules(package)
        for node in tree.body
        if isinstance(node, kinds) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]


def test_public_things_have_docstrings():
    assert undocumented(PACKAGE) == []


def test_a_missing_docstring_is_found(tmp_path):
    (tmp_path / "plan.py").write_text(
        'def said():\n    """Yes."""\ndef bare():\n    pass\nclass Bare:\n    pass\n'
        "def _private():\n    pass\n"
    )
    assert undocumented(tmp_path) == [f"{tmp_path.name}.plan.bare", f"{tmp_path.name}.plan.Bare"]


FIGURE = re.compile(r"""\s*["'\w.-]+\s*=\s*\[?\s*[-+.\d][^#]*(#.*)?""")


def unsourced(catalog: Path) -> list[str]:
    """Lines of the TOML files under ``catalog`` that give a figure and no source in a comment."""
    return [
        f"{path.relative_to(catalog)}:{number}: {line}"
        for path in sorted(catalog.rglob("*.toml"))
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if (figure := FIGURE.fullmatch(line)) and not (figure[1] or "").strip("# ")
    ]


def test_every_figure_of_the_catalogue_has_its_source():
    assert list(PACKAGE.glob("catalog/machines/*.toml"))
    assert list(PACKAGE.glob("catalog/models/*.toml"))
    assert unsourced(PACKAGE / "catalog") == []


def test_a_missing_source_is_found(tmp_path):
    (tmp_path / "said.toml").write_text(
        '# A slot.\nname = "x16"\n\n[h2d]\nlanes = 16  # data sheet\nat = [1, 2]  # measured\n'
    )
    (tmp_path / "bare.toml").write_text("# A slot.\nlanes = 16\nrate = -1e9  #\nat = [1, 2]\n")
    assert [line.split(": ")[0] for line in unsourced(tmp_path)] == [
        "bare.toml:2",
        "bare.toml:3",
        "bare.toml:4",
    ]


# Put together here, so that this file does not hold them: folders of the machine it was written
# on, and hosts of package registries.
LOCAL = [
    re.compile(rb"(?<![\w.])/" + folder + b"/") for folder in (b"work", b"root", b"opt/wheels")
]
LOCAL += [re.compile(name + rb"\.org") for name in (b"pypi", b"pythonhosted", b"npmjs")]
LOCAL += [re.compile(rb"\bshared/(?:cases|facts|hooks|paper|style)\b")]


def local_names(paths: list[Path]) -> list[str]:
    """One line for each file in ``paths`` that names the machine it was written on."""
    found = []
    for path in paths:
        if path.is_file() and (hit := [p for p in LOCAL if p.search(path.read_bytes())]):
            found.append(f"{path}: {hit[0].pattern.decode()}")
    return found


@pytest.mark.skipif(
    not shutil.which("git") or not (REPOSITORY / ".git").exists(), reason="no git checkout here"
)
def test_no_file_names_the_machine_it_was_written_on():
    """Committed files and those that would be."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    paths = [REPOSITORY / name for name in listed.stdout.split("\0") if name]
    assert REPOSITORY / "pyproject.toml" in paths
    assert local_names(paths) == []


def test_a_local_name_is_found(tmp_path):
    (tmp_path / "kept").write_text("out/{0}/a, ./{0}/b, /{0}shop".format("work"))
    (tmp_path / "folder").write_bytes(b"see /wo" + b"rk/main")
    (tmp_path / "host").write_bytes(b"https://py" + b"pi.org/simple")
    paths = sorted(tmp_path.iterdir())
    assert [line.split(": ")[0] for line in local_names(paths)] == [
        str(tmp_path / "folder"),
        str(tmp_path / "host"),
    ]


def test_prompts_are_one_json_line_each():
    lines = (REPOSITORY / "traces/prompts/prompts.jsonl").read_text("utf-8").splitlines()
    prompts = [json.loads(line) for line in lines]
    assert len({p["id"] for p in prompts}) == len({p["prompt"] for p in prompts}) == len(lines)
    assert all(set(p) == {"id", "domain", "prompt"} and p["prompt"].strip() for p in prompts)
    assert len({p["domain"] for p in prompts}) >= 10
