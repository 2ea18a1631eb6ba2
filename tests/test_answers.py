"""What people ask of a trained model: histories it never saw, filters, reasons, more data, a changed catalogue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from commands import run_command
from conftest import random_interactions

from fedmosaic import FederatedRecommender
from fedmosaic.core.errors import SettingsError, UnknownNameError
from fedmosaic.runs import run as runs
from fedmosaic.runs.settings import Settings

CLOSED = ("mosaic", "ease", "itemknn", "ials", "popularity")


def model(method: str = "mosaic", **settings: Any) -> FederatedRecommender:
    return FederatedRecommender(method, **settings).fit(random_interactions())


def own_history(fitted: FederatedRecommender, user: int) -> pl.DataFrame:
    held = fitted.training_.held.take(np.array([user]))
    return pl.DataFrame({"item": fitted.items_.take(held.items.values), "time": held.times})


@pytest.mark.parametrize("method", CLOSED)
def test_a_history_that_was_trained_on_is_answered_alike(method: str) -> None:
    fitted = model(method)
    for user in range(5):
        trained = fitted.recommend(user, k=8)
        given = fitted.recommend(history=own_history(fitted, user), k=8)
        assert trained["item"].equals(given["item"])
        assert np.allclose(trained["score"], given["score"])


def test_a_list_tells_the_order_and_a_table_several_people() -> None:
    fitted = model()
    history = own_history(fitted, 3).unique("time", keep="first", maintain_order=True)
    listed = fitted.recommend(history=history["item"].to_list(), k=5)
    assert listed["item"].equals(fitted.recommend(history=history, k=5)["item"])
    assert listed["user"].unique().to_list() == ["guest"]
    assert fitted.recommend("ann", history=history, k=5)["user"].unique().to_list() == ["ann"]
    people = pl.concat([own_history(fitted, u).with_columns(user=pl.lit(f"p{u}")) for u in (4, 2)])
    both = fitted.recommend(history=people.sample(fraction=1, shuffle=True, seed=1), k=5)
    assert both.filter(pl.col("user") == "p2")["item"].equals(fitted.recommend(2, k=5)["item"])
    with pytest.raises(SettingsError, match="belongs to one user, not to 2"):
        fitted.recommend(["a", "b"], history=history)
    with pytest.raises(SettingsError, match="leave users out"):
        fitted.recommend("a", history=people)


def test_filters_and_strangers() -> None:
    fitted = model()
    first = fitted.recommend(1, k=3)["item"].to_list()
    assert fitted.recommend(1, k=1, exclude=first[:1])["item"].to_list() == first[1:2]
    assert fitted.recommend(1, k=9, only=first[::-1])["item"].to_list() == first
    with pytest.warns(UserWarning, match="left out, not in the catalogue: 999"):
        assert fitted.recommend(1, k=9, only=[*first, 999])["item"].to_list() == first
    with pytest.warns(UserWarning, match="left out, not in the catalogue: 999"):
        assert fitted.recommend(history=[first[0], 999], k=2).height == 2
    with pytest.raises(UnknownNameError, match="unknown item '999'"):
        fitted.recommend(history=[999], on_unknown="error")
    with pytest.warns(UserWarning, match="unknown users"):
        popular = fitted.recommend("stranger", k=4)
    assert fitted.recommend(history=[], k=4)["item"].equals(popular["item"])
    with pytest.raises(SettingsError, match="on_unknown is popular or error"):
        fitted.recommend(1, on_unknown="guess")  # type: ignore[arg-type]


def test_methods_that_learnt_users_say_so() -> None:
    with pytest.raises(SettingsError, match=r"fedmf answers from what it learnt of a user.*mosaic, ease"):
        model("fedmf", rounds=1).recommend(history=[1, 2])


def test_a_history_is_explained() -> None:
    fitted = model()
    item = fitted.recommend(2, k=1)["item"][0]
    assert fitted.explain(2, item).equals(fitted.explain(item=item, history=own_history(fitted, 2)))
    with pytest.raises(SettingsError, match="either a user or a history"):
        fitted.explain(item=item)


@pytest.mark.parametrize("method", ["mosaic", "ease"])
def test_more_data_is_as_if_all_had_been_there(method: str) -> None:
    whole = random_interactions()
    rows = pl.DataFrame(
        {"user": whole.users.take(whole.user), "item": whole.items.take(whole.item), "time": whole.time}
    )
    late = pl.col("user") > 25  # users, and perhaps items, that the first part does not know
    fitted = FederatedRecommender(method).fit(rows.filter(~late), time="time")
    fitted.partial_fit(rows.filter(late), time="time")
    once = FederatedRecommender(method).fit(rows, time="time")
    assert fitted.recommend(27, k=5).equals(once.recommend(27, k=5))
    with pytest.raises(SettingsError, match="times are known of the old events or of the new ones"):
        fitted.partial_fit(rows.drop("time"))
    with pytest.raises(SettingsError, match="takes no rounds"):
        fitted.partial_fit(rows, time="time", rounds=2)


@pytest.mark.parametrize("method", ["fedmf", "pfedrec"])
def test_rounds_go_on_with_more_data(method: str, tmp_path: Path) -> None:
    data = random_interactions()
    fitted = FederatedRecommender(method, rounds=3).fit(data)
    fitted.save(tmp_path / "m")
    again = FederatedRecommender.load(tmp_path / "m")
    more = {"user": [1, 2], "item": [3, 4], "time": [60, 61]}
    one, two = (m.partial_fit(more, rounds=2, time="time") for m in (fitted, again))
    assert one.round_ == two.round_ == 5
    assert one.recommend(k=4).equals(two.recommend(k=4))
    assert 3 not in one.recommend(1, k=40)["item"]
    with pytest.raises(SettingsError, match="there are new ones; fit again"):
        fitted.partial_fit({"user": [1], "item": [4000], "time": [9]}, time="time")


def test_the_catalogue_changes_without_training(tmp_path: Path) -> None:
    fitted = model()
    first = fitted.recommend(1, k=2)["item"].to_list()
    fitted.update_catalogue(titles={"sku": list(range(40)), "name": [f"film {i}" for i in range(40)]}, retired=first[0])
    shown = fitted.recommend(1, k=1)
    assert shown["item"].to_list() == first[1:]
    assert shown["title"].to_list() == [f"film {first[1]}"]
    fitted.save(tmp_path / "m")
    assert FederatedRecommender.load(tmp_path / "m").recommend(1, k=1).equals(shown)


def test_fit_takes_files_and_frames_with_their_columns(tmp_path: Path) -> None:
    rows = {"kunde": ["a", "a", "b", "b"], "ding": ["x", "y", "x", "z"]}
    pl.DataFrame(rows).write_csv(tmp_path / "shop.csv")
    found = [
        FederatedRecommender("itemknn").fit(tmp_path / "shop.csv", item="ding"),
        FederatedRecommender("itemknn").fit(str(tmp_path / "shop.csv"), user="kunde", item="ding"),
        FederatedRecommender("itemknn").fit(rows, user="kunde", item="ding"),
    ]
    assert found[0].recommend("a").equals(found[1].recommend("a"))
    assert found[0].recommend("a").equals(found[2].recommend("a"))
    with pytest.raises(SettingsError, match="user: columns are of a table or file"):
        model().fit(random_interactions(), user="who")


def test_the_command_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings.make("fedmf", "synthetic", {"users": 30, "items": 40, "per_user": 8, "rounds": 30})

    def cut(round: int, rounds: int, line: dict[str, Any]) -> None:
        if round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.start(settings.model_copy(update={"seed": 1}), "young", on_round=cut, checkpoint_seconds=1000)
    young = run_command("recommend", "young", "--user", "1")
    assert (young.code, young.err) == (
        1,
        "error: young is not finished and holds no state yet; fedmosaic resume young goes on\n",
    )
    with pytest.raises(KeyboardInterrupt):
        runs.start(settings, "cut", on_round=cut, checkpoint_seconds=0)
    done = run_command("recommend", "cut", "--user", "1", "-k", "2")
    assert "note: cut is not finished; this is its best state so far, of round" in done.err
    runs.start(Settings.make("ease", "synthetic", {"users": 30, "items": 40, "per_user": 8}), "ease")
    found = json.loads(run_command("recommend", "ease", "--history", "3", "--history", "4", "-k", "3", "--json").out)
    assert [row["user"] for row in found] == ["guest"] * 3
    best = str(found[0]["item"])
    other = run_command("recommend", "ease", "--history", "3", "--history", "4", "--exclude", best, "--json").out
    assert best not in [str(row["item"]) for row in json.loads(other)]
    assert "what speaks for" in run_command("explain", "ease", best, "--history", "3", "--history", "4").out
    assert f"like {best}" in run_command("similar", "ease", best).out
