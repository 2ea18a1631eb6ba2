"""The page people look at, the search, the trackers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from commands import run_command

from fedmosaic.core.errors import RunError, SettingsError, UnknownNameError
from fedmosaic.methods import registry
from fedmosaic.report import figures
from fedmosaic.report.chart import Line, Panel, chart
from fedmosaic.report.page import write_page
from fedmosaic.runs.run import default_place, start
from fedmosaic.runs.run_folder import RunFolder
from fedmosaic.runs.settings import Settings, presets, read_config
from fedmosaic.runs.trackers import export
from fedmosaic.runs.tune import Search, default_space, parse_space, tune, write_preset

SMALL: dict[str, Any] = {"users": 60, "items": 40, "per_user": 8, "dim": 4, "rounds": 4, "item_rate": 2.0}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    shop = folder / "shop.csv"
    rows = [(u, (7 * u + 3 * k * k) % 31, k) for u in range(40) for k in range(6)]
    shop.write_text("user,item,when\n" + "".join(f"u{u},i{i},{t}\n" for u, i, t in sorted(set(rows))))
    (folder / "titles.csv").write_text("item,title\n" + "".join(f"i{i},<b>Film {i}</b> & more\n" for i in range(31)))
    places = []
    for method, pool in (("fedmf", "strict"), ("fedmf", "legacy"), ("pfedrec", "strict")):
        given = {"dim": 4, "rounds": 4, "item_rate": 2.0, "time": "when", "titles": str(folder / "titles.csv")}
        settings = Settings.make(method, str(shop), {**given, "pool": pool})
        places.append(folder / f"{method}-{pool}")
        start(settings, places[-1])
    return places


def test_the_page_stands_alone(runs: list[Path], tmp_path: Path) -> None:
    place = write_page(runs, tmp_path / "report.html", users=5)
    text = place.read_text()
    assert place.stat().st_size < 5_000_000
    assert not re.search(r'(src|href)="(?!data:|#)', text), "the page asks for something from elsewhere"
    assert text.count("<svg") >= 3
    for words in ("popular", "pool legacy", "config.toml", "fedmf strict", "halvings"):
        assert words in text
    assert "<b>Film" not in text, "a title reached the page unescaped"


def test_names_are_drawn_as_words_and_take_the_colour_of_the_page(tmp_path: Path) -> None:
    rows = "".join(f"u{u},i{(7 * u + 3 * k * k) % 31}\n" for u in range(40) for k in range(6))
    for name in ("plain", "pay$x_$y"):
        (tmp_path / f"{name}.csv").write_text("user,item\n" + rows)
        settings = Settings.make("fedmf", str(tmp_path / f"{name}.csv"), {"dim": 4, "rounds": 3, "item_rate": 2.0})
        start(settings, tmp_path / name)
    text = write_page([tmp_path / "plain", tmp_path / "pay$x_$y"], tmp_path / "report.html", users=2).read_text()
    assert re.search(r"</svg> fedmf pay\$x_\$y[^<]*</span>", text)
    assert 'fill="currentColor"' in text, "black words on a dark page"


def test_runs_that_knew_what_is_hidden_are_not_called_honest(tmp_path: Path) -> None:
    places = []
    for pool in ("strict", "isolated"):
        given = {"users": 40, "items": 30, "per_user": 6, "dim": 4, "rounds": 2, "item_rate": 2.0, "pool": pool}
        places.append(tmp_path / pool)
        start(Settings.make("fedmf", "synthetic", given), places[-1])
    text = write_page(places, tmp_path / "report.html", users=2).read_text()
    assert "The best of 1 honest run is fedmf strict" in text
    assert "1 run(s) knew what is hidden" in text


def test_more_curves_than_colours_can_be_drawn_and_told_apart() -> None:
    many: dict[str, Line] = {f"method {n}": ([1, 2, 3], [n, -n, 0.5]) for n in range(24)}
    text = chart([Panel("gains", "x", "y", many, zero=True)])
    assert len(set(re.findall(r"<polyline (.*?) points", text))) == 24
    pytest.importorskip("matplotlib", reason="figures of documents need the extra `reproduce`")
    figures.pyplot().close(figures.bars({"one": dict.fromkeys(many, 1.0)}, "height"))
    assert len({tuple(figures.mark(n).items()) for n in range(24)}) == 24


def test_a_chart_draws_what_it_can_and_leaves_out_what_it_cannot() -> None:
    lines: dict[str, Line] = {"<b>": ([1, 10, 100], [1e-9, float("nan"), 0.5]), "one": ([5], [0.0]), "none": ([], [])}
    for log in (False, True):
        text = chart([Panel("a & b", "x", "y", lines, log_x=True, log_y=log)])
        assert "nan" not in text.replace("<title>", ""), "a point without a place"
        assert "<b>" not in text
    places = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', chart([Panel("t", "x", "y", {"up": ([0, 1], [0, 1])})]))
    (left, low), (right, high) = [(float(x), float(y)) for x, y in places]
    assert left < right
    assert low > high, "values grow upwards, SVG's places downwards"


def test_the_page_works_in_a_browser(runs: list[Path], tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    place = write_page(runs, tmp_path / "report.html", users=5)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    seen = subprocess.run(
        [browser, *flags, "--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom", place.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in seen.stderr
    assert seen.stdout.count('<section class="card">') == 4  # the history and three lists
    assert "&lt;b&gt;Film" in seen.stdout


def test_the_page_refuses_what_is_not_finished(tmp_path: Path, runs: list[Path]) -> None:
    with pytest.raises(RunError, match="not a run folder"):
        write_page([tmp_path], tmp_path / "report.html")
    shutil.copytree(runs[0], tmp_path / "cut")
    (tmp_path / "cut" / "summary.json").unlink()
    with pytest.raises(RunError, match="not finished"):
        write_page([tmp_path / "cut"], tmp_path / "report.html")
    assert "MB" in run_command("report", str(runs[0]), "-o", str(tmp_path / "r.html"), "-q").out


def test_runs_keep_their_names_and_groups_apart(tmp_path: Path) -> None:
    """Equal methods with other selection, other candidates, several hidden items: no name, list or user is merged."""
    extras: dict[str, dict[str, Any]] = {
        "a": {},
        "b": {"select": "full:ndcg@10"},
        "c": {"candidates": 5},
        "d": {"users": 50},
        "e": {"split": "ratio", "test_share": 0.3},
    }
    for name, extra in extras.items():
        start(Settings.make("fedmf", "synthetic", {**SMALL, **extra}), tmp_path / name)
    text = write_page([tmp_path / n for n in "abcdea"], tmp_path / "report.html", users=3).read_text()
    panel = json.loads(re.search(r'id="panel">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    assert len(panel) == 4  # a and b hid the same items
    for group in panel:
        for person in group["people"].values():
            assert all(len(items) == 10 for items in person["lists"].values())
    assert [len(next(iter(g["people"].values()))["lists"]) for g in panel] == [2, 1, 1, 1]
    assert "1+5 HR@10" in text


def test_every_method_has_a_space_or_nothing_to_tune() -> None:
    for entry in registry.entries():
        for key, choice in default_space(entry.name).items():
            assert isinstance(choice, tuple)
            assert 0 < choice[0] < choice[1], (entry.name, key)
            entry.build({key: choice[0]})
            entry.build({key: choice[1]})


def test_a_search_continues_and_its_preset_runs(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="searches need the extra `tune`")
    settings = Settings.make("fedmf", "synthetic", {k: v for k, v in SMALL.items() if k != "item_rate"})
    space = parse_space(["user_rate=0.01:1", "item_rate=0.5:20"])
    told: list[int] = []

    def tell(done: int, total: int, best: float) -> None:
        told.append(done)

    first = tune(Search(settings, 3, space), tmp_path / "tune.log", tell=tell)
    more = tune(Search(settings, 5, space), tmp_path / "tune.log", tell=tell)
    assert told == [1, 2, 3, 4, 5]
    assert more.trials == 5
    assert more.value >= first.value
    assert tune(Search(settings, 3, space), tmp_path / "tune.log") == first, "more was tried than was allowed"
    write_preset(more, tmp_path / "found.toml", "fedmosaic tune fedmf synthetic")
    text = (tmp_path / "found.toml").read_text()
    assert text.startswith("# found by: fedmosaic tune fedmf synthetic\n")
    read = Settings.from_toml(text)
    assert read == more.settings
    summary = start(read, tmp_path / "run")
    best = max(line["validation"]["full"]["hr@10"] for line in _metrics(tmp_path / "run"))
    assert best == pytest.approx(more.value)
    assert summary["best_round"] >= 1


def test_shipped_presets_name_their_command_and_build() -> None:
    known = presets()
    assert known
    for name, text in known.items():
        assert re.match(r"# found by: fedmosaic tune \S+ \S+", text), name
        read_config(name).build()
    listed = json.loads(run_command("list", "presets", "--json").out)
    assert [row["preset"] for row in listed] == list(known)
    with pytest.raises(UnknownNameError, match=next(iter(known))):
        read_config("nothing")


def _metrics(place: Path) -> list[dict[str, Any]]:
    return RunFolder(place).metrics()


def test_settings_that_diverge_lose_and_bad_spaces_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="searches need the extra `tune`")
    settings = Settings.make("fedmf", "synthetic", SMALL)
    space = {"user_rate": (1e30, 1e32)}
    found = tune(Search(settings, 2, space), tmp_path / "tune.log")
    assert (found.pruned, found.settings) == (1, settings)  # the settings as given won
    broken = Settings.make("fedmf", "synthetic", {**SMALL, "user_rate": 1e31})
    with pytest.raises(RunError, match="diverge"):
        tune(Search(broken, 2, space), tmp_path / "tune.log")
    with pytest.raises(SettingsError, match="dim"):
        tune(Search(settings, 2, parse_space(["dim=0.1:8"])), tmp_path / "tune.log")
    whole = tune(Search(settings, 3, parse_space(["dim=2:8"])), tmp_path / "tune.log")
    assert isinstance(whole.settings.method_settings["dim"], int)
    for wrong in ("rate", "rate=3:1", "rate=a:b"):
        with pytest.raises(SettingsError):
            parse_space([wrong])
    for key in ("pool=strict,legacy", "seed=0,1", "candidates=5,99"):
        with pytest.raises(UnknownNameError, match="setting of method fedmf to search"):
            tune(Search(settings, 2, parse_space([key])), tmp_path / "tune.log")
    (tmp_path / "garbage.log").write_text("not a journal\n")
    for place in (tmp_path / "garbage.log", tmp_path):
        with pytest.raises(RunError, match="name another --file"):
            tune(Search(settings, 2, parse_space(["dim=2:8"])), place)
    with pytest.raises(SettingsError, match="nothing to tune"):
        tune(Search(Settings.make("popularity", "synthetic", {}), 1, {}), tmp_path / "tune.log")
    last_out = Settings.make("fedmf", "synthetic", {**SMALL, "split": "last-out"})
    with pytest.raises(SettingsError, match="validation"):
        tune(Search(last_out, 1, {"user_rate": (0.1, 1.0)}), tmp_path / "tune.log")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_the_same_records(runs: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):  # as often as one likes
        assert export(runs[0], "tensorboard", tmp_path) == 4
    (folder,) = tmp_path.glob("fedmf-strict-*")
    events = EventAccumulator(str(folder))
    events.Reload()
    points = [(e.step, pytest.approx(e.value, rel=1e-5)) for e in events.Scalars("validation/sampled/hr@10")]
    assert points == [(line["round"], line["validation"]["sampled"]["hr@10"]) for line in _metrics(runs[0])]
    assert events.Scalars("summary/test/full/hr@10")
    with pytest.raises(UnknownNameError, match="tensorboard"):
        export(runs[0], "mlflow", tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_exporting_beside_the_runs_takes_nothing_from_them(tmp_path: Path) -> None:
    pytest.importorskip("torch.utils.tensorboard")
    settings = Settings.make("fedmf", "synthetic", SMALL)
    place = default_place(settings, tmp_path)
    start(settings, place)
    before = {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
    assert export(place, "tensorboard", tmp_path) == 4
    assert {p: p.read_bytes() for p in before} == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch.utils.tensorboard")
    monkeypatch.chdir(tmp_path)
    words = ["run", "fedmf", "synthetic", *(f"{k}={v}" for k, v in SMALL.items()), "-q", "--out", "here"]
    assert run_command(*words, "--track", "tensorboard").code == 0
    assert len(list(tmp_path.glob("tracked/here-*/events*"))) == 1
    refused = run_command(*words, "--track", "paper")
    assert refused.code == 2
    assert "wandb" in refused.err


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_stays_offline(runs: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    assert export(runs[0], "wandb", tmp_path) == 4
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
