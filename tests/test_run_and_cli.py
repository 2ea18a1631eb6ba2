"""Runs, folders, the recommender and the command: what a person types and sees."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from commands import Done, run_command
from pydantic import create_model

from fedmosaic import FederatedRecommender, Interactions, leave_one_out
from fedmosaic.core.errors import ForeignError, RunError, SettingsError, UnknownNameError
from fedmosaic.core.files import load_tensors, save_tensors
from fedmosaic.methods import registry
from fedmosaic.runs.run import load_ranks, resume, start
from fedmosaic.runs.run_folder import RunFolder
from fedmosaic.runs.settings import Settings

SHOP = ["customer,sku,bought"] + [
    f"c{u},p{(u * 3 + i * i) % 17},2024-0{1 + i % 9}-1{i % 9}" for u in range(25) for i in range(9)
]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of a shop, beside which commands are given."""
    path = tmp_path / "shop.csv"
    path.write_text("\n".join(SHOP))
    monkeypatch.chdir(tmp_path)
    return path


def fedmosaic(*words: str) -> Done:
    """A command that succeeds."""
    done = run_command(*words)
    assert done.code == 0, done.err
    return done


def test_unknown_shop_in_three_lines_of_python(shop: Path) -> None:
    data = Interactions.from_csv(shop, user="customer", item="sku", time="bought")
    model = FederatedRecommender("ease", lam=5).fit(data)
    top = model.recommend("c3", k=4)
    assert top.columns == ["user", "rank", "item", "score"]
    assert top["rank"].to_list() == [1, 2, 3, 4]
    seen = set(data.items.take(data.item[data.user == data.users.positions(["c3"])[0]]))
    assert not seen & set(top["item"])


def test_unknown_shop_in_two_commands(shop: Path) -> None:
    words = ("user=customer", "item=sku", "time=bought", "lam=5")
    out = fedmosaic("run", "ease", "shop.csv", *words, "--out", "r", "--json").out
    summary = json.loads(out)
    assert {"method", "dataset", "pool", "seed", "rounds", "best_round", "validation", "test", "cost", "run"} <= set(
        summary
    )
    assert set(summary["test"]) >= {"sampled", "full"}
    assert set(summary["cost"]) == {"seconds", "cpu_seconds", "peak_mb", "bytes_up", "bytes_down"}
    lists = json.loads(fedmosaic("recommend", "r", "--user", "c3", "-k", "4", "--json").out)
    assert [r["rank"] for r in lists] == [1, 2, 3, 4]


def test_config_file_repeats_the_run(shop: Path) -> None:
    words = ("user=customer", "item=sku", "time=bought", "--rounds", "3", "--seed", "5", "dim=4")
    first = json.loads(fedmosaic("run", "ials", "shop.csv", *words, "--out", "a", "--json").out)
    again = json.loads(fedmosaic("run", "--config", "a/config.toml", "--out", "b", "--json").out)
    assert first["test"] == again["test"]
    assert (shop.parent / "a/config.toml").read_text() == (shop.parent / "b/config.toml").read_text()
    other = run_command("run", "--config", "a/config.toml", "seed=6", "--out", "a")
    assert other.code == 1
    assert "holds a run with other settings" in other.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("run", "eese", "ml-100k"), 2, "unknown method 'eese'; did you mean 'ease'?"),
        (("run", "ease", "ml-100"), 2, "unknown data set 'ml-100'; did you mean 'ml-100k'?"),
        (("run", "ease", "shop.csv", "lamda=3"), 2, "unknown setting 'lamda'; did you mean 'lam'?"),
        (("run", "ease", "shop.csv", "lam=soft"), 2, "setting lam of method ease: Input should be a valid number"),
        (("run", "ease", "shop.csv", "pool=loose"), 2, "setting pool of the run: Input should be 'strict', 'legacy'"),
        (("run", "ease", "shop.csv", "seed=1", "--seed", "2"), 2, "given both as an option and as key=value"),
        (("run", "ease", "shop.csv", "--rounds", "3"), 2, "setting rounds of method ease"),
        (("run", "ease"), 2, "say which METHOD and DATASET"),
        (("run", "ease", "shop.csv", "user=who"), 1, "no column 'who' for the user; the columns are 'customer', 'sku'"),
        (("run", "ease", "none.csv"), 1, "none.csv: no such file"),
        (("recommend", "nowhere", "--user", "1"), 1, "nowhere is not a run folder"),
        (("list", "fish"), 2, "unknown catalogue 'fish'"),
        (("bogus",), 2, "No such command"),
        (("compare", "ease", "--data", "ml-100"), 2, "unknown data set 'ml-100'; did you mean 'ml-100k'?"),
        (("compare", "ease", "--data", "synthetic", "--runs", "shop.csv"), 1, "error: shop.csv: File exists"),
        (("tune", "ease", "synthetic", "--file", "."), 1, "error: . cannot hold trials"),
    ],
)
def test_wrong_requests_are_told_in_a_line(shop: Path, words: tuple[str, ...], code: int, said: str) -> None:
    if words[0] == "tune":
        pytest.importorskip("optuna", reason="searches need the extra `tune`")
    done = run_command(*words)
    assert done.code == code
    assert said in done.err
    assert "Traceback" not in done.err
    assert not (shop.parent / "runs").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("list", "data"),
        ("list", "metrics"),
        ("describe", "ials"),
        ("doctor",),
        ("data", "list"),
        ("data", "describe", "shop.csv", "user=customer", "item=sku"),
    ],
)
def test_every_listing_has_a_table_and_json(shop: Path, words: tuple[str, ...]) -> None:
    assert fedmosaic(*words).out.count("\n") > 3
    json.loads(fedmosaic(*words, "--json").out)


def test_tables_show_protocol_references_and_folder(shop: Path) -> None:
    done = fedmosaic("run", "ease", "shop.csv", "user=customer", "item=sku", "--out", "r")
    for word in ("chance", "popularity", "ease", "pool strict", "run folder: r", "95 % interval", "bytes up"):
        assert word in done.out
    assert fedmosaic("show", "r").out == done.out
    unknown = fedmosaic("recommend", "r", "--user", "nobody", "-k", "2")
    assert "note: unknown users get the most popular items: nobody" in unknown.err
    assert unknown.out.count("p") > 1


# --- run folder -------------------------------------------------------------------------------------------------


def shop_settings(shop: Path, **given: Any) -> Settings:
    return Settings.make(
        "ials", str(shop), {"user": "customer", "item": "sku", "time": "bought", "dim": 4, "rounds": 6} | given
    )


def fingerprint(place: Path) -> dict[str, Any]:
    """What a run ends in, without clocks."""
    state, _ = load_tensors(place / "checkpoint" / "best.safetensors")
    summary = json.loads((place / "summary.json").read_text())
    lines = [json.loads(x) for x in (place / "metrics.jsonl").read_text().splitlines()]
    ranks = (place / "ranks.safetensors").read_bytes()
    return {
        "state": {k: v.tobytes() for k, v in state.items()},
        "summary": {k: v for k, v in summary.items() if k not in {"cost", "run"}},
        "lines": [{k: v for k, v in line.items() if k != "seconds"} for line in lines],
        "ranks": ranks,
    }


def test_resume_after_every_round_gives_the_same_bytes(shop: Path, tmp_path: Path) -> None:
    settings = shop_settings(shop)
    start(settings, tmp_path / "whole")
    expected = fingerprint(tmp_path / "whole")

    class StopError(Exception):
        pass

    for last in range(1, 7):

        def stop(number: int, total: int, line: dict[str, Any], last: int = last) -> None:
            if number == last:
                raise StopError

        place = tmp_path / f"cut{last}"
        with pytest.raises(StopError):
            start(settings, place, on_round=stop, checkpoint_seconds=0)
        assert not RunFolder.open(place).finished
        with pytest.raises(RunError, match="not finished"):
            RunFolder.open(place).summary()
        resume(place)
        assert fingerprint(place) == expected


@pytest.mark.slow
def test_kill_minus_nine_then_resume(shop: Path, tmp_path: Path) -> None:
    settings = shop_settings(shop, rounds=400)
    start(settings, tmp_path / "whole")
    config = tmp_path / "whole" / "config.toml"
    command = ["run", "--config", str(config), "--out", str(tmp_path / "cut"), "--quiet"]
    process = subprocess.Popen([sys.executable, "-m", "fedmosaic", *command])
    wait_for(tmp_path / "cut" / "metrics.jsonl", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not RunFolder.open(tmp_path / "cut").finished
    resume(tmp_path / "cut")
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")


def test_the_command_is_a_program(shop: Path, tmp_path: Path) -> None:
    """The same words to `python -m fedmosaic`, in a process: the same output, the same codes; Ctrl-C is told."""

    def program(*words: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "fedmosaic", *words]
        return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    wrong = program("run", "eese", "ml-100k")
    words = ("user=customer", "item=sku", "rounds=1000000", "--out", "long", "--quiet")
    interrupted = program("run", "ials", "shop.csv", *words)
    try:
        assert wrong.communicate(timeout=300)[1] == run_command("run", "eese", "ml-100k").err
        assert wrong.returncode == 2
        wait_for(tmp_path / "long" / "metrics.jsonl", interrupted)
        interrupted.send_signal(signal.SIGINT)
        told = interrupted.communicate(timeout=300)[1]
        assert told.splitlines()[-1] == "interrupted; long holds what is done: fedmosaic resume long"
        assert interrupted.returncode == 1
    finally:
        interrupted.kill()
        interrupted.wait()


def wait_for(path: Path, process: subprocess.Popen[Any]) -> None:
    """Until a running program has written a file, on a busy machine too."""
    end = time.monotonic() + 300
    while not path.exists():
        assert process.poll() is None, "the program has ended"
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.005)


def test_damaged_checkpoint_falls_back_to_the_previous(shop: Path, tmp_path: Path) -> None:
    settings = shop_settings(shop)
    start(settings, tmp_path / "r", checkpoint_seconds=0)
    expected = fingerprint(tmp_path / "r")
    latest = tmp_path / "r" / "checkpoint" / "latest.safetensors"
    whole = latest.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(100):
        mutant = bytearray(whole)
        if rng.random() < 0.5:
            mutant = mutant[: rng.integers(0, len(mutant))]
        else:
            mutant[rng.integers(0, len(mutant))] ^= 1 << rng.integers(0, 8)
        if bytes(mutant) == whole:
            continue
        latest.write_bytes(bytes(mutant))
        with pytest.raises(RunError, match="damaged"):
            load_tensors(latest)
    (tmp_path / "r" / "summary.json").unlink()
    resume(tmp_path / "r")
    assert fingerprint(tmp_path / "r") == expected
    for name in ("latest", "previous"):
        (latest.parent / f"{name}.safetensors").write_bytes(b"gone")
    (tmp_path / "r" / "summary.json").unlink()
    resume(tmp_path / "r")  # nothing usable: starts over, to the same end
    assert fingerprint(tmp_path / "r") == expected


def test_settings_round_trip_and_order_of_authority() -> None:
    settings = Settings.make("itemknn", "ml-100k", {"neighbours": 20, "pool": "legacy", "select": "full:ndcg@10"})
    assert Settings.from_toml(settings.to_toml()) == settings
    assert settings.key() == Settings.from_toml(settings.to_toml()).key()
    assert settings.key() != Settings.make("itemknn", "ml-100k", {"neighbours": 21}).key()
    assert "leaks the held-out item" in settings.protocol("leave-one-out")
    with pytest.raises(SettingsError, match="is not TOML"):
        Settings.from_toml("method = ")
    with pytest.raises(SettingsError, match="does not say dataset"):
        Settings.from_toml('method = "ease"')
    with pytest.raises(UnknownNameError, match="'nieghbours'; did you mean 'neighbours'"):
        Settings.make("itemknn", "ml-100k", {"nieghbours": 3})


def test_a_default_that_changes_makes_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Settings.make("fedmf", "ml-100k")
    old, explicit = before.key(), Settings.make("fedmf", "ml-100k", {"dim": 32}).key()
    assert old == explicit, "the same run by default and by name has two addresses"
    entry = registry.entry("fedmf")
    wider = create_model("Wider", __base__=entry.settings, dim=(int, 64))
    monkeypatch.setitem(registry._registered, "fedmf", replace(entry, settings=wider))
    assert before.key() != old
    assert Settings.make("fedmf", "ml-100k", {"dim": 32}).key() == explicit


def test_without_validation_the_last_round_is_taken(shop: Path, tmp_path: Path) -> None:
    settings = shop_settings(shop, split="ratio", validation_share=0.0, test_share=0.2)
    summary = start(settings, tmp_path / "r")
    assert (summary["best_round"], "validation" in summary) == (6, False)


def test_resume_refuses_other_data(shop: Path, tmp_path: Path) -> None:
    settings = shop_settings(shop)
    start(settings, tmp_path / "r", checkpoint_seconds=0)
    (tmp_path / "r" / "summary.json").unlink()
    shop.write_text(shop.read_text().replace("c1,", "c9,", 3))
    with pytest.raises(RunError, match="begun on other data"):
        resume(tmp_path / "r")


def test_a_checkpoint_of_another_run_is_refused_by_name(shop: Path, tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("other", 1)):
        start(shop_settings(shop, seed=seed), tmp_path / name)
    for state in ("latest", "best"):
        shutil.copy(*(tmp_path / run / "checkpoint" / f"{state}.safetensors" for run in ("other", "one")))
    (tmp_path / "one" / "summary.json").unlink()
    with pytest.raises(ForeignError, match=r"latest\.safetensors belongs to another run \(method ials"):
        resume(tmp_path / "one")
    with pytest.raises(ForeignError, match=r"best\.safetensors belongs to another run"):
        RunFolder.open(tmp_path / "one").recommender()


def test_a_run_that_lost_patience_stays_where_it_stopped(shop: Path, tmp_path: Path) -> None:
    summary = start(shop_settings(shop, rounds=60, patience=2, select="full:ndcg@10"), tmp_path / "r")
    assert summary["rounds"] == summary["best_round"] + 2 < 60
    expected = fingerprint(tmp_path / "r")
    (tmp_path / "r" / "summary.json").unlink()
    resume(tmp_path / "r")
    assert fingerprint(tmp_path / "r") == expected


def test_folder_killed_at_birth_and_lost_best_are_survived(shop: Path, tmp_path: Path) -> None:
    settings = shop_settings(shop)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "env.json").write_text("{}")
    (tmp_path / "r" / ".config.toml-x").write_text("half")
    start(settings, tmp_path / "r")
    expected = fingerprint(tmp_path / "r")
    (tmp_path / "r" / "checkpoint" / "best.safetensors").write_bytes(b"gone")
    (tmp_path / "r" / "summary.json").unlink()
    resume(tmp_path / "r")
    assert fingerprint(tmp_path / "r") == expected


def test_none_settings_are_written_and_read(shop: Path, tmp_path: Path) -> None:
    settings = Settings.make("itemknn", str(shop), {"neighbours": None})
    assert Settings.from_toml(settings.to_toml()) == settings


def test_foreign_folder_is_not_overwritten(shop: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(RunError, match="not a run folder"):
        start(shop_settings(shop), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_ranks_of_a_run_can_be_read_back(shop: Path, tmp_path: Path) -> None:
    summary = start(shop_settings(shop), tmp_path / "r")
    for protocol in ("full", "sampled"):
        assert load_ranks(tmp_path / "r", protocol).mean("hr", 10) == summary["test"][protocol]["hr@10"]


# --- recommender ------------------------------------------------------------------------------------------------


def frame(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    rows = sorted({(int(u), int(i)) for u, i in zip(rng.integers(0, 20, 200), rng.integers(0, 30, 200), strict=True)})
    return {"user": [u for u, _ in rows], "item": [i for _, i in rows]}


@pytest.mark.parametrize("method", ["popularity", "itemknn", "ease", "ials"])
def test_save_load_gives_the_same_recommendations(method: str, tmp_path: Path) -> None:
    model = FederatedRecommender(method, seed=3).fit(frame())
    model.save(tmp_path / "m")
    loaded = FederatedRecommender.load(tmp_path / "m")
    assert loaded.recommend(k=7).equals(model.recommend(k=7))
    assert loaded.get_params() == model.get_params()
    assert loaded.similar_items(3, k=4).equals(model.similar_items(3, k=4))


def test_batch_equals_single_and_score_agrees() -> None:
    model = FederatedRecommender("ease", lam=3).fit(frame())
    together = model.recommend([4, 9], k=5)
    apart = pl.concat([model.recommend(4, k=5), model.recommend([9], k=5)])
    assert together["item"].equals(apart["item"])
    assert together["score"].to_list() == pytest.approx(apart["score"].to_list(), abs=1e-6)
    first = together.row(0, named=True)
    assert model.score(first["user"], first["item"])["score"].to_list() == pytest.approx([first["score"]], abs=1e-6)
    assert model.score([4, 9], [1, 2, 3]).height == 6


def test_ids_come_back_as_they_went_in() -> None:
    model = FederatedRecommender("popularity").fit(frame())
    assert model.recommend(4)["user"].dtype.is_integer()
    assert model.recommend("4")["item"].equals(model.recommend(4)["item"])
    with pytest.warns(UserWarning, match="unknown users get the most popular items: 777"):
        assert model.recommend(777, k=3).height == 3
    with pytest.raises(UnknownNameError, match="unknown user '777'"):
        model.recommend(777, on_unknown="error")
    with pytest.raises(UnknownNameError, match="unknown item"):
        model.score(4, 999)
    with pytest.raises(SettingsError, match="k must be at least 1"):
        model.recommend(4, k=0)


def test_user_who_has_seen_nearly_everything_gets_a_short_list() -> None:
    data = {"user": [1] * 9 + [2] * 10, "item": [*range(9), *range(10)]}
    model = FederatedRecommender("popularity").fit(data)
    assert model.recommend(1, k=5)["item"].to_list() == [9]
    assert model.recommend(2, k=5).height == 0
    assert model.recommend(2, k=5, exclude_seen=False).height == 5


def test_mistakes_of_order_are_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not trained yet"):
        FederatedRecommender("ease").recommend(1)
    model = FederatedRecommender("ease").fit(frame())
    with pytest.raises(RunError, match="nothing is held out"):
        model.evaluate()
    with pytest.raises(RunError, match="missing"):
        FederatedRecommender.load(tmp_path)
    model.save(tmp_path / "m")
    (tmp_path / "m" / "model.json").write_text('{"format": 99}')
    with pytest.raises(RunError, match="has format 99"):
        FederatedRecommender.load(tmp_path / "m")
    assert FederatedRecommender("ease").fit(leave_one_out(Interactions.from_frame(frame()))).evaluate().full.users.size


def test_tensor_files_keep_dtype_shape_and_meta(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {
        "a": np.arange(6).reshape(2, 3).T,
        "b": np.zeros(0, dtype=np.float32),
        "c": np.array([True]),
    }
    save_tensors(tmp_path / "t", tensors, {"round": 3})
    found, meta = load_tensors(tmp_path / "t")
    assert meta == {"round": 3}
    for name, value in tensors.items():
        assert (found[name].dtype, found[name].tolist()) == (value.dtype, value.tolist())
