"""Answers over HTTP: the lists of `recommend`, typed refusals, limits, and no trace of what was asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from commands import run_command
from conftest import random_interactions

from fedmosaic import FederatedRecommender

pytest.importorskip("starlette", reason="serving needs the extra `serve`")
httpx = pytest.importorskip("httpx", reason="asks by httpx")
http = pytest.importorskip("fedmosaic.serving.http")


class Client:
    """Asks an application without a network, in one loop."""

    def __init__(self, model: FederatedRecommender) -> None:
        self.runner = asyncio.Runner()
        transport = httpx.ASGITransport(app=http.app(model))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://here")

    def get(self, path: str) -> Any:
        return self.runner.run(self.http.get(path))

    def post(self, path: str, **what: Any) -> Any:
        return self.runner.run(self.http.post(path, **what))


@pytest.fixture(scope="module")
def model() -> FederatedRecommender:
    data = random_interactions()
    titles = {"item": list(range(40)), "title": [f"film {i}" for i in range(40)]}
    return FederatedRecommender().fit(data).update_catalogue(titles=titles)


@pytest.fixture(scope="module")
def client(model: FederatedRecommender) -> Iterator[Client]:
    made = Client(model)
    yield made
    made.runner.close()


def ask(client: Client, **question: Any) -> Any:
    return client.post("/recommend", json=question)


def test_lists_are_those_of_recommend(model: FederatedRecommender, client: Client) -> None:
    found = ask(client, user=3, k=5).json()
    expected = model.recommend(3, k=5)
    assert [row["item"] for row in found["items"]] == expected["item"].to_list()
    assert found["items"][0]["title"] == expected["title"][0]
    assert (found["source"], found["user"]) == ("model", 3)
    history = [4, 9, 11]
    found = ask(client, history=history, times=[5, 1, 7], exclude=[expected["item"][0]], k=40).json()
    table = {"item": history, "time": [5, 1, 7]}
    answered = model.recommend(history=table, exclude=expected["item"][0], k=40)
    assert [row["item"] for row in found["items"]] == answered["item"].to_list()
    assert found["source"] == "history"
    assert len(ask(client, history=[4], only=[1, 2, 3]).json()["items"]) == 3


def test_a_batch_is_its_questions_one_by_one(client: Client) -> None:
    questions: list[dict[str, Any]] = [
        {"user": 1}, {"history": [3, 5]}, {"user": "stranger", "k": 2}, {"history": []}, {"history": [999, 7], "k": 3},
    ]  # fmt: skip
    together = client.post("/recommend/batch", json={"questions": questions}).json()["answers"]
    assert together == [ask(client, **one).json() for one in questions]
    assert [one["source"] for one in together] == ["model", "history", "popular", "popular", "history"]
    assert together[4]["left_out"] == [999]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/recommend", b"{", 400, "not_json"),
        ("/recommend", b"\xff", 400, "not_json"),
        ("/recommend", b"{}", 422, "invalid"),
        ("/recommend", b'{"user": 1, "history": [2]}', 422, "invalid"),
        ("/recommend", b'{"history": [2], "times": [1, 2]}', 422, "invalid"),
        ("/recommend", b'{"user": 1, "k": 100000}', 422, "invalid"),
        ("/recommend", b'{"user": 1, "kk": 1}', 422, "invalid"),
        ("/recommend", b'{"user": "x", "on_unknown": "error"}', 404, "unknown_user"),
        ("/recommend", b'"' + b"x" * http.MOST_BYTES + b'"', 413, "too_large"),
        ("/recommend/batch", b'{"questions": []}', 422, "invalid"),
        ("/similar", b'{"item": 999}', 404, "unknown_item"),
        ("/elsewhere", b"{}", 404, "no_such_path"),
        ("/health", b"{}", 405, "wrong_method"),
    ],
)
def test_what_is_wrong_is_told_by_kind(client: Client, path: str, body: bytes, status: int, kind: str) -> None:
    found = client.post(path, content=body)
    assert (found.status_code, found.json()["error"]["kind"]) == (status, kind)
    assert found.json()["error"]["message"]


def test_a_method_that_answers_no_history_says_so() -> None:
    model = FederatedRecommender("fedmf", rounds=1).fit(random_interactions())
    client = Client(model)
    assert ask(client, user=1).status_code == 200
    found = ask(client, history=[1])
    assert (found.status_code, found.json()["error"]["kind"]) == (422, "cannot_answer")
    client.runner.close()


def test_health_metrics_and_document(client: Client, model: FederatedRecommender) -> None:
    told = client.get("/health").json()
    assert (told["status"], told["method"], told["items"]) == ("ok", "mosaic", len(model.items_))
    ask(client, user=1)
    text = client.get("/metrics").text
    assert 'fedmosaic_requests_total{path="/recommend",status="200"}' in text
    assert "fedmosaic_request_seconds_count" in text
    document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    for name in ("Question", "Answer", "Questions", "Alike", "Error", "Listed"):
        assert name in document["components"]["schemas"]


def test_no_history_is_kept(client: Client, model: FederatedRecommender, caplog: pytest.LogCaptureFixture) -> None:
    before = model.training_.histories.values.copy()
    with caplog.at_level(logging.DEBUG):
        ask(client, history=[31, 17, 5], user=None)
    assert "31, 17" not in caplog.text
    assert (model.training_.histories.values == before).all()


def test_the_command_answers_on_this_machine_alone(tmp_path: Any, model: FederatedRecommender) -> None:
    model.save(tmp_path / "m")
    done = run_command("serve", str(tmp_path / "m"), "--host", "0.0.0.0")
    assert done.code == 2
    assert "0.0.0.0 is not this machine" in done.err
