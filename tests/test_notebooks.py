"""The notebooks run from top to bottom, in a kernel of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples" / "notebooks").glob("*.ipynb"))


def test_there_are_three() -> None:
    assert len(NOTEBOOKS) == 3


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="notebooks need the extra `notebooks`")
    nbclient = pytest.importorskip("nbclient", reason="notebooks need the extra `notebooks`")
    pytest.importorskip("ipykernel", reason="notebooks need the extra `notebooks`")
    if path.stem.startswith("2"):
        pytest.importorskip("torch", reason="the engines are held to each other by PyTorch")
    monkeypatch.setenv("FEDMOSAIC_DATA", str(real_data))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(path.parents[2]), os.environ.get("PYTHONPATH", "")]))
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [out for cell in book.cells for out in cell.get("outputs", [])]
    assert any("data" in out for out in shown)
