"""Others can add: methods, data sources, metrics, reductions and engines, without editing the package."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from commands import run_command
from conftest import random_interactions

from fedmosaic import FederatedRecommender, leave_one_out
from fedmosaic import extend as fm
from fedmosaic.core import plugins
from fedmosaic.core.errors import SettingsError, UnknownNameError
from fedmosaic.data import sources
from fedmosaic.engines.choice import ENGINES
from fedmosaic.evaluation.metrics import METRICS
from fedmosaic.methods import registry

MINE = '''
from fedmosaic import extend as fm


def twins(data_dir, **options):
    rows = [(u, i, u + i) for u in range(24) for i in range(12) if (u + i) % 3]
    users, items, times = zip(*rows)
    return fm.Interactions.from_frame({"user": users, "item": items, "time": times}, time="time")


class Mine(fm.LinearSettings):
    """FedMF under another name."""


fm.register_source(fm.OwnSource("twins", "a made-up set", twins))
fm.register(fm.Entry("mine", "FedMF again", "this file", Mine, lambda s: fm.federation(s, fm.linear(s))))
'''


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    monkeypatch.delenv(plugins.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    yield file
    forget(file)


def forget(file: Path) -> None:
    """As a new process would be: the file has not been imported."""
    registry._registered.pop("mine", None)
    sources._own.pop("twins", None)
    plugins._imported.discard(str(file))
    for name in [n for n in sys.modules if n.startswith("fedmosaic_import_mine")]:
        del sys.modules[name]
    os.environ.pop(plugins.VARIABLE, None)


def test_a_file_adds_a_method_and_a_data_set_to_every_command(own_file: Path) -> None:
    code = ["--import", str(own_file)]
    assert run_command("run", "mine", "twins").code == 2
    done = run_command("run", "mine", "twins", "rounds=2", "dim=4", "--out", "run", "--json", "--quiet", *code)
    assert done.code == 0, done.err
    assert json.loads(done.out)["method"] == "mine"
    assert "mine" in run_command("list", "methods", *code).out
    assert "twins" in run_command("list", "data", *code).out
    assert "FedMF again" in run_command("describe", "mine", *code).out
    assert json.loads(run_command("recommend", "run", "--user", "3", "-k", "2", "--json", *code).out)[0]["rank"] == 1


def test_runs_of_a_study_know_the_file_too(own_file: Path) -> None:
    words = ("compare", "mine", "--data", "twins", "--seeds", "1", "--set", "rounds=1", "--set", "dim=4", "--json")
    done = run_command(*words, "--quiet", "--import", str(own_file))
    assert done.code == 0, done.err
    assert "mine" in [row["name"] for row in json.loads(done.out)["rows"]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\nraise RuntimeError('no')", "line 2: RuntimeError: no"),
        ("import nothing_like_this", "ModuleNotFoundError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_a_file_that_fails_is_told_in_a_line(own_file: Path, text: str, words: str) -> None:
    own_file.write_text(text)
    done = run_command("list", "methods", "--import", str(own_file))
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert "no such file" in run_command("list", "methods", "--import", "nowhere.py").err


def test_edited_code_is_not_served_old_results(own_file: Path) -> None:
    words = ("compare", "mine", "--data", "twins", "--seeds", "1", "--set", "rounds=1", "--set", "dim=4", "--json")
    code = ("--quiet", "--import", str(own_file))
    first = run_command(*words, *code)
    assert first.code == 0, first.err
    runs = {p: p.stat().st_mtime_ns for p in Path("runs").glob("mine-*/summary.json")}
    again = run_command(*words, *code)
    assert {p: p.stat().st_mtime_ns for p in runs} == runs, again.err
    own_file.write_text(MINE + "# edited\n")
    forget(own_file)
    assert run_command(*words, *code).code == 0
    assert all(p.stat().st_mtime_ns > before for p, before in runs.items())
    own_file.write_text(MINE + "# edited again\n")
    forget(own_file)
    (place,) = {p.parent for p in runs}
    done = run_command("recommend", str(place), "--user", "3", "--import", str(own_file))
    assert "belongs to another run" in done.err


def test_a_setting_that_every_run_has_is_refused_in_a_method(own_file: Path) -> None:
    own_file.write_text(MINE.replace('"""FedMF under another name."""', "item: int = 1"))
    done = run_command("run", "mine", "twins", "--import", str(own_file))
    assert "method mine has a setting 'item', which is a setting of every run" in done.err


def test_a_maker_that_forgets_the_federation_is_told_so() -> None:
    entry = fm.Entry("bare", "", "", fm.LinearSettings, fm.linear)
    with pytest.raises(SettingsError, match=r"make of method bare gave a Algorithm.*federation\(s, algorithm\)"):
        entry.build()


def test_a_name_is_taken_once() -> None:
    with pytest.raises(SettingsError, match="there is a method 'ease' already"):
        fm.register(fm.Entry("ease", "", "", fm.LinearSettings))
    with pytest.raises(SettingsError, match="there is a data set 'ml-100k' already"):
        fm.register_source(fm.OwnSource("ml-100k", "", lambda folder: random_interactions()))
    with pytest.raises(SettingsError, match="there is an engine 'fused' already"):
        fm.register_engine("fused", lambda algorithm, holding: fm.Refusal("no"))
    with pytest.raises(SettingsError, match="is taken"):
        fm.register_metric("ndcg", METRICS["hr"])


PACKAGED = fm.Entry(
    "packaged", "from a package", "elsewhere", fm.LinearSettings, lambda s: fm.federation(s, fm.linear(s))
)


def test_an_installed_package_adds_by_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("packaged", f"{__name__}:PACKAGED", registry.GROUP)
    monkeypatch.setattr(plugins, "points", lambda group: {"packaged": point} if group == registry.GROUP else {})
    assert "packaged" in registry.names()
    assert registry.entry("packaged").title == "from a package"
    registry._registered.pop("packaged")
    wrong = EntryPoint("packaged", f"{__name__}:MINE", registry.GROUP)
    monkeypatch.setattr(plugins, "points", lambda group: {"packaged": wrong} if group == registry.GROUP else {})
    with pytest.raises(SettingsError, match="is a str, not a Entry"):
        registry.entry("packaged")


@pytest.fixture
def first_place() -> Iterator[str]:
    """1 where the held-out item is on top."""
    fm.register_metric("top", fm.Metric("the held-out item is first", lambda ranks, k: ranks.of_first(np.ones(1))))
    yield "top"
    del METRICS["top"]


def test_a_metric_stands_in_results_and_can_choose_the_round(first_place: str) -> None:
    split = leave_one_out(random_interactions())
    summary = FederatedRecommender("popularity").fit(split).evaluate().summary()
    assert summary["full"]["top@10"] == summary["full"]["top@5"] < summary["full"]["hr@5"]
    from fedmosaic.runs.settings import Settings

    assert Settings.make("fedmf", "ml-100k", {"select": "full:top@10"}).select == "full:top@10"
    with pytest.raises(SettingsError, match="with a metric of hr, recall, ndcg, mrr, top"):
        Settings.make("fedmf", "ml-100k", {"select": "full:middle@10"})


@pytest.fixture
def halting() -> Iterator[str]:
    fm.register_engine("halting", lambda algorithm, holding: fm.Refusal("it never runs anything"))
    yield "halting"
    del ENGINES["halting"]


def test_an_engine_of_ones_own_is_named_and_explains_itself(halting: str) -> None:
    method = registry.entry("fedmf").build({"engine": halting})
    with pytest.raises(SettingsError, match="engine=halting does not run this algorithm: it never runs anything"):
        method.check_installed()
    assert "it never runs anything" in run_command("describe", "fedmf").out


def test_unknown_names_list_what_exists() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'pfedrec'"):
        registry.entry("pfedrek")
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = fm.Nothing
