"""Laws of the house: imports follow the arrows, importing is quick, nothing is pickled, files stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import fedmosaic

ROOT = Path(fedmosaic.__file__).parent
# A module may import only from rooms at its own height or below.
FLOORS = [
    {"errors", "presets", "keys", "memory", "ragged", "store", "tree", "spectrum"},
    {"data", "metrics", "evaluate", "training"},
    {"local", "models", "objective", "upload", "server"},
    {"algorithm"},
    {"personalise", "closed_form", "privacy"},
    {"runtime"},
    {"hosts", "methods", "landscape"},
    {"zoo", "testing"},
    {"config", "recommender"},
    {"folder"},
    {"run", "ledger"},
    {"study", "together", "deploy"},
    {"comparison", "tune", "trackers"},
    {"report"},
    {"cards"},
    {"cli_options"},
    {"cli_evidence", "cli_deploy"},
    {"cli", "__main__"},
]
HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> dict[str, ast.Module]:
    return {str(p.relative_to(ROOT)): ast.parse(p.read_text()) for p in sorted(ROOT.rglob("*.py"))}


def room_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def test_imports_follow_the_arrows() -> None:
    wrong = []
    for path, tree in modules().items():
        if room_of(path) == "__init__":
            continue
        assert room_of(path) in HEIGHT, f"{path} has no place in the house: add it to FLOORS"
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fedmosaic"):
                inner = node.module.split(".")[1:]
                names = [inner[0]] if inner else [a.name for a in node.names]
            wrong += [f"{path} imports {n}" for n in names if HEIGHT[n] > HEIGHT[room_of(path)]]
    assert wrong == []


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
