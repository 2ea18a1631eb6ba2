"""Laws of the house: imports follow the arrows, importing is quick, nothing is pickled, files stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import fedmosaic

ROOT = Path(fedmosaic.__file__).parent
# Rooms from the ground up: a module imports from its own room and from rooms below, nowhere else.
ROOMS = (
    "core", "data", "evaluation", "training", "algorithm", "privacy", "engines", "methods", "serving", "runs", "audit",
    "deploy", "report", "reproduce", "cli",
)  # fmt: skip
# Modules outside the rooms, and why: the public names, the command, what others extend with, what others test with.
LOOSE = ("__init__", "__main__", "extend", "testing")


@cache
def modules() -> dict[str, ast.Module]:
    return {str(p.relative_to(ROOT)): ast.parse(p.read_text()) for p in sorted(ROOT.rglob("*.py"))}


def imports_of(tree: ast.Module) -> set[str]:
    """Modules of the package that a module imports, at its head or inside a function."""
    known = {"fedmosaic." + name_of(p) for p in modules()}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedmosaic":
            inner = {f"{node.module}.{a.name}" for a in node.names}
            found |= {m for m in inner if m in known} or {str(node.module)}
    return found - {"fedmosaic"}


def name_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_every_module_has_a_room() -> None:
    assert {p for p in modules() if p.split("/")[0].removesuffix(".py") not in (*ROOMS, *LOOSE)} == set()


def test_every_folder_is_a_package() -> None:
    """Else it is left out of the wheel."""
    folders = {p.parent for p in ROOT.rglob("*.py")}
    assert {str(f) for f in folders if not (f / "__init__.py").is_file()} == set()


def test_git_ignores_no_file_of_ours() -> None:
    """What git ignores, style checks skip and no commit carries."""
    if not (ROOT.parent / ".git").exists():
        pytest.skip("not a git checkout")
    files = "\n".join(str(p) for p in [*ROOT.rglob("*.py"), *(ROOT.parent / "tests").rglob("*.py")])
    done = subprocess.run(
        ["git", "check-ignore", "--stdin", "--no-index"], input=files, capture_output=True, text=True, cwd=ROOT.parent
    )
    assert done.stdout == ""


def test_imports_follow_the_arrows() -> None:
    wrong = []
    for path, tree in modules().items():
        room = path.split("/")[0]
        for name in imports_of(tree) if room in ROOMS else ():
            other = name.split(".")[1]
            if other not in ROOMS or ROOMS.index(other) > ROOMS.index(room):
                wrong.append(f"{path} imports {name}")
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {f"fedmosaic.{name_of(path)}": imports_of(tree) for path, tree in modules().items()}
    for name in graph:
        graph[name] -= {name}
    while leaves := {name for name, needs in graph.items() if not needs & graph.keys()}:
        graph = {name: needs for name, needs in graph.items() if name not in leaves}
    assert sorted(graph) == []


def test_nothing_can_unpickle() -> None:
    banned = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}
    found = []
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found += [f"{path}: {a.name}" for a in node.names if a.name.split(".")[0] in banned]
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in banned:
                found.append(f"{path}: {node.module}")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                found.append(f"{path}: allow_pickle")
    assert found == []


def test_files_fit_the_budget() -> None:
    assert {p: n for p in modules() if (n := len((ROOT / p).read_text().splitlines())) > 400} == {}


HEAVY = ("torch", "numba", "scipy", "polars", "matplotlib", "sklearn", "flwr")


def loaded(code: str) -> list[str]:
    """Heavy modules that a fresh process has loaded after running some code."""
    told = f"{code}\nimport sys\nprint([m for m in {HEAVY} if m in sys.modules], file=sys.__stdout__)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    found: list[str] = ast.literal_eval(done.stdout.splitlines()[-1])
    return found


def test_importing_loads_nothing_heavy() -> None:
    assert loaded("import fedmosaic, sys; assert 'numpy' not in sys.modules") == []


@pytest.mark.parametrize(
    "words",
    [("list", "methods"), ("describe", "pfedrec"), ("describe", "metamf"), ("doctor",), ("run", "pfedrek", "ml-100k")],
)
def test_questions_load_nothing_heavy(words: tuple[str, ...]) -> None:
    code = f"import sys; sys.path.insert(0, 'tests')\nfrom commands import run_command\nrun_command(*{words!r})"
    assert loaded(code) == []


def test_the_spine_needs_no_pytorch() -> None:
    """Everything that methods on linear scorers need, from data to a deployed node, is imported without PyTorch."""
    rooms = "serving.recommender runs.run runs.study runs.comparison report.page deploy.node deploy.coordinator extend"
    lines = [f"import fedmosaic.{name}" for name in rooms.split()]
    assert "torch" not in loaded("\n".join(lines))


def test_compiled_functions_take_few_arguments() -> None:
    wide = []
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and path.startswith("engines"):
                count = len(node.args.args) + len(node.args.kwonlyargs)
                wide += [f"{path}: {node.name} has {count}"] if count > 10 else []
    assert wide == []


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for path, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_public_names_exist_and_are_few() -> None:
    assert len(fedmosaic.__all__) < 30
    for name in fedmosaic.__all__:
        assert getattr(fedmosaic, name) is not None
