"""A bundle answers as the model it came from: by a page of NumPy, and by a page in a browser without a network."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from commands import run_command
from conftest import random_interactions

from fedmosaic import FederatedRecommender
from fedmosaic.core.errors import RunError, SettingsError
from fedmosaic.data.sources import load
from fedmosaic.serving.bundle import export

FORMS: list[tuple[str, dict[str, Any]]] = [
    ("mosaic", {}), ("mosaic", {"rank": 8}), ("mosaic", {"softmax": 2}), ("mosaic", {"trend": 0.5}), ("ease", {}),
    ("itemknn", {"neighbours": 5}), ("popularity", {}),
]  # fmt: skip
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-quic", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip


def reader_of(bundle: Path) -> Any:
    """The bundle's own copy of its reader, imported as a stranger would."""
    spec = importlib.util.spec_from_file_location("reader", bundle / "reader.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Bundle(bundle)


def browse(page: Path, tmp_path: Path, asked: list[list[str]]) -> dict[str, Any]:
    """Answers of a bundle's page in Chromium, whose network leads nowhere; and what it asked of a network."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    told = f"""<script>
    const answers = {json.dumps(asked)}.map(history => recommend(history, 10));
    const blocked = []; document.addEventListener("securitypolicyviolation", e => blocked.push(e.blockedURI));
    document.body.textContent = "ANSWER" + JSON.stringify({{answers, ready: document.documentElement.dataset.ready,
      asked: performance.getEntriesByType("resource").map(e => e.name)}}) + "END";
    </script></body>"""
    copy = tmp_path / "page.html"
    copy.write_text(page.read_text().replace("</body>", told))
    seen = subprocess.run(
        [browser, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000",
         "--enable-logging=stderr", "--dump-dom", copy.as_uri()],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in seen.stderr, seen.stderr[-2000:]
    found = re.search("ANSWER(.*)END", seen.stdout)
    assert found is not None
    answer: dict[str, Any] = json.loads(found[1].replace("&amp;", "&"))
    return answer


def histories(model: FederatedRecommender, count: int) -> list[pl.DataFrame]:
    """Of some users, and of a stranger who has nothing."""
    found = []
    for user in np.linspace(0, len(model.users_) - 1, count - 1).astype(np.int64):
        held = model.training_.held.take(np.array([user]))
        times = held.times if held.times is not None else np.arange(held.items.values.size)
        found.append(pl.DataFrame({"item": model.items_.take(held.items.values), "time": times}))
    return [*found, found[0].clear()]


@pytest.mark.parametrize(("method", "settings"), FORMS)
def test_the_reader_answers_as_the_model(method: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = FederatedRecommender(method, **settings).fit(random_interactions())
    model.update_catalogue(retired=model.recommend(1, k=1)["item"].to_list())
    bundle = reader_of(export(model, tmp_path / "bundle"))
    for history in histories(model, 12):
        expected = model.recommend(history=history, k=8)
        found = bundle.recommend(history["item"].to_list(), 8, times=history["time"].to_list())
        assert [item for item, _ in found] == expected["item"].to_list()
        assert np.allclose([score for _, score in found], expected["score"], atol=1e-5)
    first = found[0][0]
    assert first not in [item for item, _ in bundle.recommend([], 8, exclude=[first, "none such"])]


@pytest.mark.parametrize(("method", "settings"), FORMS[:3])
def test_the_page_answers_as_the_model(method: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = FederatedRecommender(method, **settings).fit(random_interactions())
    lists = [[str(i) for i in history["item"]] for history in histories(model, 10)]
    seen = browse(export(model, tmp_path / "bundle") / "index.html", tmp_path, lists)
    expected = [[str(i) for i in model.recommend(history=one, k=10)["item"]] for one in lists]
    assert seen["answers"] == expected
    assert seen["asked"] == []


@pytest.mark.slow
def test_a_hundred_people_get_the_lists_of_the_model(real_data: Path, tmp_path: Path) -> None:
    """3,706 films; the page is opened from a file, and its network leads nowhere."""
    model = FederatedRecommender("mosaic", rank=64).fit(load("ml-1m", real_data, download=False))
    lists = [[str(i) for i in history["item"]] for history in histories(model, 100)]
    place = export(model, tmp_path / "bundle")
    seen, reader = browse(place / "index.html", tmp_path, lists), reader_of(place)
    expected = [[str(i) for i in model.recommend(history=one, k=10)["item"]] for one in lists]
    assert seen["answers"] == expected
    assert [[item for item, _ in reader.recommend(one)] for one in lists] == expected
    assert seen["asked"] == []
    assert (place / "index.html").stat().st_size < 8 << 20


def test_the_page_names_no_address(tmp_path: Path) -> None:
    page = (export(FederatedRecommender("ease").fit(random_interactions()), tmp_path / "b") / "index.html").read_text()
    assert "default-src 'none'" in page
    assert "http:" not in page
    assert "https:" not in page


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    data = random_interactions()
    with pytest.raises(SettingsError, match="cannot be exported; mosaic, ease, itemknn and popularity do"):
        export(FederatedRecommender("fedmf", rounds=1).fit(data), tmp_path / "a")
    with pytest.raises(SettingsError, match=r"mosaic with these settings \(features=, folds="):
        export(FederatedRecommender("mosaic", features=8).fit(data), tmp_path / "a")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("")
    model = FederatedRecommender("ease").fit(data)
    with pytest.raises(RunError, match="exists and is no bundle"):
        export(model, tmp_path / "other")
    export(model, tmp_path / "a")
    assert export(model, tmp_path / "a", page=False).is_dir()


def test_the_command_exports_and_the_reader_needs_numpy_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    FederatedRecommender("itemknn").fit(random_interactions()).save("model")
    done = run_command("export", "model", "-o", "bundle")
    assert "bundle/index.html:" in done.out
    code = (
        "import sys; sys.path.insert(0, 'bundle'); import reader; reader.Bundle('bundle').recommend([1, 2]); "
        "print(sorted(m for m in ('fedmosaic', 'polars', 'scipy', 'safetensors') if m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
