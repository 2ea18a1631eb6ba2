"""Questions of many people answered together: one pass of the model over all of them, lists of ids out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedmosaic.core.errors import UnknownNameError
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.evaluation.evaluate import top_items
from fedmosaic.serving.asked import GivenHistories, shut_out
from fedmosaic.serving.recommender import FederatedRecommender

MOST_ITEMS = 10_000  # of a history, or of a filter
LONGEST = 1_000  # a list
Id = str | int
Source = Literal["model", "history", "popular"]
POPULAR: Source = "popular"


class Question(BaseModel):
    """Who asks, or from which history, and what may be in the list."""

    model_config = ConfigDict(extra="forbid")

    user: Id | None = Field(default=None, description="a user the model was trained on")
    history: list[Id] | None = Field(
        default=None,
        max_length=MOST_ITEMS,
        description="ids of items, earliest first; used once and not kept",
    )
    times: list[int] | None = Field(default=None, max_length=MOST_ITEMS, description="beside the history, where known")
    k: int = Field(default=10, ge=1, le=LONGEST, description="length of the list")
    exclude: list[Id] = Field(default_factory=list, max_length=MOST_ITEMS, description="items that are left out")
    only: list[Id] | None = Field(default=None, max_length=MOST_ITEMS, description="items that alone are chosen from")
    exclude_seen: bool = Field(default=True, description="leave out what is in the history")
    on_unknown: Literal["popular", "error"] = Field(
        default="popular", description="of an unknown user: the most popular items, or an error"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Question:
        if (self.user is None) == (self.history is None):
            raise ValueError("say either a user or a history")
        if self.times is not None and len(self.times) != len(self.history or []):
            raise ValueError(f"{len(self.history or [])} items have {len(self.times)} times")
        return self


class Listed(BaseModel):
    """An item of a list."""

    item: Id
    score: float
    title: str | None = None


class Answer(BaseModel):
    """A list, and what it was made from: what was learnt of the user, the history, or popularity."""

    user: Id | None = None
    source: Source
    items: list[Listed]
    left_out: list[Id] = Field(default_factory=list, description="items of the question that are not in the catalogue")


def answers(model: FederatedRecommender, questions: Sequence[Question]) -> list[Answer]:
    """Lists for several questions at once; the same as `recommend` gives one by one.

    >>> shop = {"user": ["ann", "ann", "bob", "bob"], "item": ["tea", "cup", "tea", "pot"]}
    >>> model = FederatedRecommender("itemknn").fit(shop)
    >>> [found.items[0].item for found in answers(model, [Question(user="ann"), Question(history=["pot"])])]
    ['pot', 'tea']
    """
    count, n_items = len(questions), len(model.items_)
    scores, source = np.tile(model.popular_, (count, 1)), [POPULAR] * count
    seen: list[Any] = [np.zeros(0, np.int32)] * count
    left_out: list[list[Id]] = [[] for _ in questions]
    users = [at for at, one in enumerate(questions) if one.user is not None]
    places = model.users_.positions([questions[at].user or 0 for at in users])
    for at, place in zip(users, places, strict=True):
        if place < 0 and questions[at].on_unknown == "error":
            raise UnknownNameError("user", questions[at].user, model.users_.ids.to_list())
    known = [at for at, place in zip(users, places, strict=True) if place >= 0]
    if known:
        rows = places[places >= 0]
        scores[known] = model._scores(rows)
        learnt = model.training_.histories
        for at, row in zip(known, rows, strict=True):
            source[at], seen[at] = "model", learnt[int(row)]
    given = [at for at, one in enumerate(questions) if one.history is not None]
    if given:
        model._check_answers_histories()
        histories = [_history(model, questions[at], left_out[at]) for at in given]
        filled = [(at, held) for at, held in zip(given, histories, strict=True) if held.items.values.size]
        if filled:
            together = _together([held for _, held in filled])
            training = model._as_training(together, np.arange(len(filled)))
            scores[[at for at, _ in filled]] = model._scores(np.arange(len(filled)), training)
        for at, told in filled:
            source[at], seen[at] = "history", told.items.values
    retired: Any = model.catalogue_.retired if model.catalogue_.retired is not None else []
    found = []
    for at, one in enumerate(questions):
        if one.exclude or one.only is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scores[at, shut_out(model.items_, one.exclude or None, one.only, "popular")] = -np.inf
        scores[at, retired] = -np.inf
        if one.exclude_seen:
            scores[at, seen[at]] = -np.inf
        top = top_items(scores[at : at + 1], min(one.k, n_items))[0]
        top = top[top >= 0]
        ids = model.items_.take(top).to_list()
        titles = model.info_["title"].gather(top).to_list() if model.info_ is not None else [None] * len(ids)
        items = [Listed(item=i, score=float(s), title=t) for i, s, t in zip(ids, scores[at, top], titles, strict=True)]
        found.append(Answer(user=one.user, source=source[at], items=items, left_out=left_out[at]))
    return found


def _history(model: FederatedRecommender, asked: Question, left_out: list[Id]) -> GivenHistories:
    """As `asked_histories` makes it, without a table in between: a server does this for every request."""
    items = asked.history or []
    positions = model.items_.positions(items)
    left_out += [one for one, place in zip(items, positions, strict=True) if place < 0]
    times = np.array(asked.times, np.int64) if asked.times is not None else np.arange(len(items))
    here = np.flatnonzero(positions >= 0)
    order = here[np.argsort(times[here], kind="stable")]
    return GivenHistories(["guest"], Ragged(positions[order].astype(np.int32), np.array([0, order.size])), times[order])


def _together(histories: Sequence[GivenHistories]) -> GivenHistories:
    values = np.concatenate([one.items.values for one in histories])
    rows = np.repeat(np.arange(len(histories)), [one.items.values.size for one in histories])
    times: I64 = np.concatenate([one.times for one in histories if one.times is not None])
    return GivenHistories(list(range(len(histories))), Ragged.group(rows, values, len(histories)), times)
