"""The recommender people hold: fit, recommend, score, similar_items, evaluate, save, load. Ids in, ids out."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from fedmosaic.core.errors import ForeignError, RunError, SettingsError
from fedmosaic.core.files import digest_of, load_tensors, read_json, save_tensors, write_json
from fedmosaic.core.looks import Glance, Shown, notebook_bar
from fedmosaic.core.ragged import I64
from fedmosaic.data.interactions import Interactions
from fedmosaic.data.negatives import Pool, draw_candidates, training_set
from fedmosaic.data.split import Part, Split
from fedmosaic.data.titles import titled
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.data.vocab import Id
from fedmosaic.engines.federation import Federation
from fedmosaic.evaluation.evaluate import Evaluation, checked_scores, evaluate, top_items
from fedmosaic.methods import registry
from fedmosaic.methods.closed_form import ClosedForm
from fedmosaic.serving.asked import GivenHistories, OnUnknown, as_ids, asked_histories, shut_out
from fedmosaic.serving.catalogue import Catalogue
from fedmosaic.serving.lessons import as_interactions, everything, joined, refuse
from fedmosaic.training.loop import LOOK, Begun, OnRound, Validation, train
from fedmosaic.training.method import Method

FORMAT = 2
Users = Sequence[Id] | Id | None


class FederatedRecommender(Shown):
    """A method by its name, trained on interactions and answering in the ids they came with.

    method: a name of `fedmosaic list methods`. seed: everything random follows from it. pool: which items may be
    training negatives. settings: those of the method, as `fedmosaic describe METHOD` lists them.

    >>> shop = {"customer": ["ann", "ann", "bob", "bob", "cem"], "sku": ["tea", "cup", "tea", "pot", "tea"]}
    >>> model = FederatedRecommender("itemknn").fit(Interactions.from_frame(shop, user="customer", item="sku"))
    >>> model.recommend("cem", k=2)["item"].to_list()
    ['cup', 'pot']
    """

    def __init__(self, method: str = "mosaic", *, seed: int = 0, pool: Pool = "strict", **settings: Any) -> None:
        self.method, self.seed, self.pool, self.settings = method, seed, pool, settings
        self.method_: Method[Any] = registry.entry(method).build(settings)

    def glance(self) -> Glance:
        """The method, what it was set to, and what it was trained on."""
        settings = ", ".join(f"{k}={v}" for k, v in self.settings.items()) or "defaults"
        facts = [("settings", settings), ("seed", str(self.seed))]
        if getattr(self, "state_", None) is None:
            return Glance(f"FederatedRecommender: {self.method}, not trained yet", facts)
        facts += [
            ("trained on", f"{self.training_.histories.values.size:,} events of {len(self.users_):,} users"),
            ("items", f"{len(self.items_):,}" + (", with titles" if self.info_ is not None else "")),
            ("round", f"{self.round_} of at most {self.method_.rounds}"),
            ("answers histories", "yes" if getattr(self.method_, "from_history", False) else "no"),
        ]
        return Glance(f"FederatedRecommender: {self.method}", facts)

    def get_params(self) -> dict[str, Any]:
        """Arguments of the constructor, as given."""
        return {"method": self.method, "seed": self.seed, "pool": self.pool, **self.settings}

    def fit(
        self,
        data: Interactions | Split | Any,
        on_round: OnRound | None = None,
        *,
        patience: int | None = None,
        **columns: Any,
    ) -> FederatedRecommender:
        """Train on everything (interactions, a table, or the path of a file), or on a split's train part.

        data: what to learn from. Given a split, the round with the best validation HR@10 is kept.
        on_round: called as on_round(round, rounds, what is known). patience: stop after so many rounds without a best.
        columns: of a table or file: user, item, time ..., as of `Interactions.from_frame` and `from_csv`.
        """
        validation = None
        if isinstance(data, Split):
            refuse(columns, "a split")
            self.split_: Split | None = data
            known, training = data.interactions, training_set(data, self.pool)
            if data.validation.values.size:
                validation = Validation(data, draw_candidates(data), "full:hr@10", scores=LOOK)
        else:
            self.split_ = None
            known = as_interactions(data, columns)
            training = everything(known)
        self.method_.check_installed()
        return self._trained(Catalogue(known.users, known.items, known.info, training), validation, on_round, patience)

    def partial_fit(
        self, data: Interactions | Any, on_round: OnRound | None = None, *, rounds: int | None = None, **columns: Any
    ) -> FederatedRecommender:
        """Learn from more events, of known and new users and items.

        Closed forms sum over everybody's history again, the new events included: the same as a fit on all. Methods that
        learn in rounds go on from where they are, and know users and items they began with, alone.
        data, columns: as of `fit`. rounds: how many more, for methods that learn in rounds (as many as they have).
        """
        self._check_fitted()
        more = as_interactions(data, columns)
        known = joined(self.catalogue_, more)
        catalogue = Catalogue(known.users, known.items, known.info, everything(known))
        self.split_ = None
        if isinstance(self.method_, ClosedForm):
            if rounds is not None:
                raise SettingsError(f"{self.method} sums once more over everybody; it takes no rounds")
            return self._trained(catalogue, None, on_round)
        if not isinstance(self.method_, Federation) or self.method_.budget is not None:
            why = (
                "its epsilon counts the rounds of one training" if isinstance(self.method_, Federation) else "its kind"
            )
            raise SettingsError(f"{self.method} cannot go on from where it is ({why}); fit again on everything")
        if len(known.users) > len(self.users_) or len(known.items) > len(self.items_):
            raise SettingsError(
                f"{self.method} holds a row per user and item it began with, and there are new ones; fit again on "
                "everything, or use a closed form (mosaic, ease, itemknn, ials), which takes new ones"
            )
        trained = self.method_
        self.method_ = replace(trained, rounds=self.round_ + (rounds or trained.rounds))
        begun = Begun(self.state_, self.round_, self.round_, -1.0)
        return self._trained(catalogue, None, on_round, begun=begun)

    def _trained(
        self,
        catalogue: Catalogue,
        validation: Validation | None,
        on_round: OnRound | None,
        patience: int | None = None,
        begun: Begun[Any] | None = None,
    ) -> FederatedRecommender:
        state: Any = None
        on_round = on_round or notebook_bar(f"{self.method} learns")
        for seen in train(self.method_, catalogue.training, self.seed, validation, begun, patience=patience):
            if seen.best:
                state, self.round_ = seen.step.state, seen.step.round
            if on_round is not None:
                on_round(seen.step.round, self.method_.rounds, seen.line)
        return self.restore(catalogue, state, self.round_)

    def restore(self, catalogue: Catalogue, state: Any, round: int = 0) -> FederatedRecommender:
        """Take over a trained state and the round it is of (used by `fit`, `load` and run folders)."""
        self.users_, self.items_ = catalogue.users, catalogue.items
        self.info_, self.training_ = catalogue.info, catalogue.training
        self.catalogue_, self.state_, self.round_ = catalogue, state, round
        counts = np.bincount(catalogue.training.histories.values, minlength=len(catalogue.items))
        self.popular_ = counts.astype(np.float64)  # what whoever is not known is shown
        return self

    def recommend(
        self,
        users: Users = None,
        k: int = 10,
        *,
        history: Any = None,
        exclude: Users = None,
        only: Users = None,
        exclude_seen: bool = True,
        on_unknown: OnUnknown = "popular",
    ) -> pl.DataFrame:
        """The best `k` items of each user: columns user, rank, item, score, and title where known.

        users: one id, several, or all users (none given). k: length of each list. history: answer from it and not from
        what was trained on: ids, earliest first, or a table with columns item, and time and user where there are such
        (methods that answer from histories can). exclude, only: items that are left out, or that alone are chosen from.
        exclude_seen: leave out what a user had in training, or has in the history. on_unknown: a user the model has not
        met gets the most popular items, with a warning, and an unknown item of a history is left out; or either is an
        error (`"error"`).

        >>> shop = {"user": ["ann", "ann", "bob", "bob", "cem"], "item": ["tea", "cup", "tea", "pot", "tea"]}
        >>> model = FederatedRecommender("itemknn").fit(shop)
        >>> model.recommend(history=["cup"], k=2, exclude="pot")["item"].to_list()
        ['tea']
        """
        self._check_fitted()
        if k < 1:
            raise SettingsError(f"k must be at least 1, got {k}")
        if on_unknown not in ("popular", "error"):
            raise SettingsError(f"on_unknown is popular or error, not {on_unknown!r}")
        closed = shut_out(self.items_, exclude, only, on_unknown) | self.catalogue_.retired_mask
        if history is not None:
            self._check_answers_histories()
            asked = asked_histories(history, users, self.items_, on_unknown)
            names, count = asked.names, len(asked.names)
            positions = np.where(asked.items.lengths > 0, np.arange(count), -1)
        else:
            asked = None
            names = as_ids(users) if users is not None else self.users_.ids.to_list()
            positions = self.users_.require(names) if on_unknown == "error" else self.users_.positions(names)
            if (positions < 0).any():
                strangers = [str(names[i]) for i in np.flatnonzero(positions < 0)[:5]]
                more = " ..." if (positions < 0).sum() > 5 else ""
                warnings.warn(f"unknown users get the most popular items: {', '.join(strangers)}{more}", stacklevel=2)
        frames = [
            self._top(names[i : i + 1024], positions[i : i + 1024], k, exclude_seen, closed, asked)
            for i in range(0, len(names), 1024)
        ]
        return pl.concat(frames) if frames else self._frame([], np.empty((0, k), np.int32), np.empty((0, k)))

    def score(self, users: Sequence[Id] | Id, items: Sequence[Id] | Id) -> pl.DataFrame:
        """Scores of every given user for every given item: columns user, item, score.

        users, items: one id or several; unknown ones are refused by name.
        """
        self._check_fitted()
        who, what = as_ids(users), as_ids(items)
        rows, columns = self.users_.require(who), self.items_.require(what)
        scores = self._scores(rows)[:, columns]
        return pl.DataFrame(
            {
                "user": self.users_.take(np.repeat(rows, columns.size)),
                "item": self.items_.take(np.tile(columns, rows.size)),
                "score": scores.ravel(),
            }
        )

    def similar_items(self, items: Sequence[Id] | Id, k: int = 10) -> pl.DataFrame:
        """Items alike in the model's own terms: columns to, rank, item, score (cosine), and title where known.

        items: one id or several. k: how many for each.
        """
        self._check_fitted()
        what = as_ids(items)
        rows = self.items_.require(what)
        vectors = np.ascontiguousarray(self.method_.vectors(self.state_), dtype=np.float64)
        length = np.maximum(np.linalg.norm(vectors, axis=1), 1e-12)
        cosine = (vectors[rows] @ vectors.T) / np.outer(length[rows], length)
        cosine[np.arange(rows.size), rows] = -np.inf
        top = top_items(cosine, k)
        return self._frame(what, top, np.take_along_axis(cosine, np.maximum(top, 0), axis=1)).rename({"user": "to"})

    def explain(self, user: Id | None = None, item: Id | None = None, *, history: Any = None) -> pl.DataFrame:
        """Which items of a user's history speak for an item, and how much: columns item, share of the score, title.

        For methods that score by items of the history (ease, itemknn, mosaic); the largest shares first.
        user: whose training history is asked; history: or one that is given, as in `recommend`. item: what it is of.
        """
        self._check_fitted()
        if item is None or (user is None) == (history is None):
            raise SettingsError("say which item, and either a user or a history")
        (what,) = self.items_.require([item])
        form = self.method_
        if not isinstance(form, ClosedForm):
            raise SettingsError(f"{self.method} does not score by items of the history; ease, itemknn and mosaic do")
        if history is None:
            held = self.training_.held.take(self.users_.require([user] if user is not None else []))
        else:
            asked = asked_histories(history, None, self.items_, "error")
            held = self._as_training(asked, np.array([0])).held
        shares = np.asarray(form.shares(self.state_, held, int(what)), dtype=np.float64)
        order = np.argsort(-shares, kind="stable")
        places = held.items.values[order]
        columns = {"item": self.items_.take(places), "share": shares[order]}
        if self.info_ is not None:
            columns["title"] = self.info_["title"].gather(places)
        return pl.DataFrame(columns)

    def update_catalogue(self, *, titles: Any = None, retired: Users = None) -> FederatedRecommender:
        """Change what is shown, not what was learnt.

        titles: a table or file of ids and titles, which replaces what was known. retired: items that no list shows any
        more; whoever has them in a history is still answered from them. New items come with their first events, by
        `partial_fit`.
        """
        self._check_fitted()
        catalogue = self.catalogue_
        if titles is not None:
            catalogue = replace(catalogue, info=titled(titles, self.items_))
        if retired is not None:
            catalogue = replace(catalogue, retired=self.items_.require(as_ids(retired)))
        return self.restore(catalogue, self.state_, self.round_)

    def evaluate(self, part: Part = "test", *, candidates: int = 99, candidate_seed: int = 0) -> Evaluation:
        """Rank the held-out items of the split this model was fitted on.

        part: `test` or `validation`. candidates: sampled items beside each held-out one. candidate_seed: draws them.
        """
        self._check_fitted()
        if self.split_ is None:
            raise RunError("fitted on everything, so nothing is held out; fit on a split, e.g. leave_one_out(data)")
        lists = draw_candidates(self.split_, candidates, seed=candidate_seed)
        return evaluate(self.method_.scorer(self.training_, self.state_), self.split_, part, lists)

    def save(self, folder: str | Path) -> Path:
        """Write the model: settings, vocabularies, histories, tensors. No pickle."""
        self._check_fitted()
        place = Path(folder)
        self.catalogue_.save(place)
        save_tensors(place / "state.safetensors", self.method_.pack(self.state_), self._binding())
        write_json(place / "model.json", {"format": FORMAT, "params": self.get_params(), "round": self.round_})
        return place

    def _binding(self) -> dict[str, str]:
        """What a state belongs to: a method with its settings, and a catalogue."""
        ids = self.items_.ids.cast(pl.String).to_list()
        return {"params": json.dumps(self.get_params(), sort_keys=True), "items": digest_of({}, "\n".join(ids))[:16]}

    @classmethod
    def load(cls, folder: str | Path) -> FederatedRecommender:
        """Read a saved model; it gives the same recommendations."""
        place = Path(folder)
        described = read_json(place / "model.json")
        if described.get("format") != FORMAT:
            raise RunError(f"{place} has format {described.get('format')!r}; this version reads {FORMAT}")
        model = cls(**described["params"])
        model.split_ = None
        arrays, binding = load_tensors(place / "state.safetensors")
        model.restore(Catalogue.load(place), None, int(described.get("round", 0)))
        if binding != model._binding():
            raise ForeignError(
                f"{place / 'state.safetensors'} belongs to another model (method, settings or items differ)"
            )
        model.state_ = model.method_.unpack(arrays, str(place / "state.safetensors"))
        return model

    def _top(
        self,
        wanted: Sequence[Id],
        positions: I64,
        k: int,
        exclude_seen: bool,
        closed: npt.NDArray[np.bool_],
        asked: GivenHistories | None,
    ) -> pl.DataFrame:
        known = np.flatnonzero(positions >= 0)
        scores = np.tile(self.popular_, (positions.size, 1))
        if known.size:
            training, rows = self.training_, positions[known]
            if asked is not None:
                training, rows = self._as_training(asked, rows), np.arange(known.size)
            scores[known] = self._scores(rows, training)
            if exclude_seen:
                seen = training.histories.take(rows)
                scores[known[seen.rows], seen.values] = -np.inf
        scores[:, closed] = -np.inf
        top = top_items(scores, k)
        return self._frame(wanted, top, np.take_along_axis(scores, np.maximum(top, 0), axis=1))

    def _scores(self, positions: I64, training: TrainingSet | None = None) -> npt.NDArray[np.floating]:
        scorer = self.method_.scorer(self.training_ if training is None else training, self.state_)
        return checked_scores(scorer, positions, len(self.items_))

    def _as_training(self, asked: GivenHistories, rows: npt.NDArray[np.integer]) -> TrainingSet:
        """Histories that were given, in the place of those that were trained on."""
        items, times = asked.take(rows)
        return TrainingSet(items, items, len(self.items_), times=times if self.training_.times is not None else None)

    def _check_answers_histories(self) -> None:
        if not getattr(self.method_, "from_history", False):
            raise SettingsError(
                f"{self.method} answers from what it learnt of a user in training; methods that answer from a history: "
                "mosaic, ease, itemknn, ials, sasrec, popularity"
            )

    def _frame(self, who: Sequence[Id], top: npt.NDArray[np.int32], scores: npt.NDArray[np.floating]) -> pl.DataFrame:
        real = top >= 0
        row, place = (part.tolist() for part in np.nonzero(real))
        if self.users_.ids.dtype == pl.String:
            named = pl.Series("user", [str(who[r]) for r in row], dtype=pl.String)
        else:
            named = pl.Series("user", [who[r] for r in row], strict=False)
        columns = {
            "user": named,
            "rank": pl.Series([p + 1 for p in place], dtype=pl.Int32),
            "item": self.items_.take(top[real]),
            "score": scores[real].astype(np.float64),
        }
        if self.info_ is not None:
            columns["title"] = self.info_["title"].gather(top[real])
        return pl.DataFrame(columns)

    def _check_fitted(self) -> None:
        if getattr(self, "state_", None) is None:
            raise RunError("this recommender is not trained yet; call fit(...) first")
