"""Laws of the house: imports follow the arrows, importing is quick, nothing is pickled, files stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import fedmosaic

ROOT = Path(fedmosaic.__file__).parent
# Rooms from the ground up: a module imports from its own room and from rooms below, nowhere else.
ROOMS = (
    "core", "data", "evaluation", "training", "algorithm", "privacy", "engines", "methods", "serving", "runs", "deploy",
    "report", "reproduce", "cli",
)  # fmt: skip
# Modules outside the rooms, and why: the public names, the command, what others extend with, what others test with.
LOOSE = ("__init__", "__main__", "extend", "testing")


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
    return found


def name_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_every_module_has_a_room() -> None:
    assert {p for p in modules() if p.split("/")[0].removesuffix(".py") not in (*ROOMS, *LOOSE)} == set()


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


def test_import_is_quick_and_light() -> None:
    code = "import sys, fedmosaic; print([m for m in ('numpy', 'torch', 'numba', 'polars') if m in sys.modules])"
    began = time.perf_counter()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert time.perf_counter() - began < 1
    assert out.strip() == "[]"


def test_public_names_exist_and_are_few() -> None:
    assert len(fedmosaic.__all__) < 30
    for name in fedmosaic.__all__:
        assert getattr(fedmosaic, name) is not None
