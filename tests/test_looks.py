"""What notebooks and terminals show: one screen, the numbers a person wants, ids and titles as text."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import random_interactions

from fedmosaic import FederatedRecommender, Interactions
from fedmosaic.core import looks
from fedmosaic.data.split import Split
from fedmosaic.runs import run as runs
from fedmosaic.runs.run_folder import RunFolder
from fedmosaic.runs.settings import Settings


def test_everything_fits_a_screen_and_has_its_html(small: Split, tmp_path: Path) -> None:
    model = FederatedRecommender("itemknn")
    assert "not trained yet" in repr(model)
    model.fit(small)
    runs.start(Settings.make("itemknn", "synthetic", {"users": 30, "items": 40, "per_user": 8}), tmp_path / "run")
    shown = {
        "Interactions:": random_interactions(),
        "Split:": small,
        "Evaluation: test, 30 users": model.evaluate(),
        "FederatedRecommender: itemknn": model,
        "Run ": RunFolder.open(tmp_path / "run"),
    }
    for title, value in shown.items():
        text = repr(value)
        assert text.startswith(title)
        assert len(text.splitlines()) <= looks.TALL
        assert max(map(len, text.splitlines())) <= 120 + len(str(tmp_path))
        assert value._repr_html_().startswith("<div><strong>")
    assert "popularity" in repr(shown["Run "])


def test_what_a_file_says_is_text() -> None:
    data = Interactions.from_frame({"user": ["<b>", "a"], "item": ["x", "y"], "r": [1, 5]}, rating="r", min_rating=2)
    assert "1 x rating under 2" in repr(data)
    assert "<b>" not in looks.Glance("<b>", [("<i>", "&")]).html


def test_a_bar_is_for_notebooks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looks.notebook_bar("x") is None
