"""The recommender people hold: fit, recommend, score, similar_items, evaluate, save, load. Ids in, ids out."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from fedmosaic.core.errors import ForeignError, RunError, SettingsError
from fedmosaic.core.files import digest_of, load_tensors, read_json, save_tensors, write_json
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.clean import as_polars
from fedmosaic.data.interactions import Interactions
from fedmosaic.data.negatives import Pool, draw_candidates, training_set
from fedmosaic.data.split import Part, Split
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.data.vocab import Id
from fedmosaic.evaluation.evaluate import Evaluation, checked_scores, evaluate, top_items
from fedmosaic.methods import registry
from fedmosaic.methods.closed_form import ClosedForm
from fedmosaic.serving.catalogue import Catalogue
from fedmosaic.training.loop import OnRound, Validation, train
from fedmosaic.training.method import Method

FORMAT = 2
Users = Sequence[Id] | Id | None


class FederatedRecommender:
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

    def get_params(self) -> dict[str, Any]:
        """Arguments of the constructor, as given."""
        return {"method": self.method, "seed": self.seed, "pool": self.pool, **self.settings}

    def fit(
        self, data: Interactions | Split | Any, on_round: OnRound | None = None, *, patience: int | None = None
    ) -> FederatedRecommender:
        """Train on everything (`Interactions`, or a table with columns user and item), or on a split's train part.

        data: what to learn from. Given a split, the round with the best validation HR@10 (1 + 99) is kept.
        on_round: called as on_round(round, rounds, what is known). patience: stop after so many rounds without a best.
        """
        validation = None
        if isinstance(data, Split):
            self.split_: Split | None = data
            known, training = data.interactions, training_set(data, self.pool)
            if data.validation.values.size:
                validation = Validation(data, draw_candidates(data))
        else:
            self.split_ = None
            known = data if isinstance(data, Interactions) else Interactions.from_frame(as_polars(data))
            histories = Ragged.group(known.user, known.item, len(known.users))
            training = TrainingSet(histories, histories.unique(), len(known.items), times=known.time)
        self.method_.check_installed()
        state: Any = None
        for seen in train(self.method_, training, self.seed, validation, patience=patience):
            if seen.best:
                state = seen.step.state
            if on_round is not None:
                on_round(seen.step.round, self.method_.rounds, seen.line)
        return self.restore(Catalogue(known.users, known.items, known.info, training), state)

    def restore(self, catalogue: Catalogue, state: Any) -> FederatedRecommender:
        """Take over a trained state (used by `fit`, `load` and run folders)."""
        self.users_, self.items_ = catalogue.users, catalogue.items
        self.info_, self.training_ = catalogue.info, catalogue.training
        self.catalogue_, self.state_ = catalogue, state
        return self

    def recommend(
        self,
        users: Users = None,
        k: int = 10,
        *,
        exclude_seen: bool = True,
        on_unknown: Literal["popular", "error"] = "popular",
    ) -> pl.DataFrame:
        """The best `k` items of each user: columns user, rank, item, score, and title where known.

        users: one id, several, or all users (none given). k: length of each list. exclude_seen: leave out what a user
        had in training. on_unknown: a user the model has not met gets the most popular items, with a warning, or is an
        error (`"error"`).
        """
        self._check_fitted()
        if k < 1:
            raise SettingsError(f"k must be at least 1, got {k}")
        wanted = _as_list(users) if users is not None else self.users_.ids.to_list()
        positions = self.users_.require(wanted) if on_unknown == "error" else self.users_.positions(wanted)
        if (positions < 0).any():
            strangers = [str(wanted[i]) for i in np.flatnonzero(positions < 0)[:5]]
            warnings.warn(
                f"unknown users get the most popular items: {', '.join(strangers)}"
                + (" ..." if (positions < 0).sum() > 5 else ""),
                stacklevel=2,
            )
        frames = [
            self._top(wanted[i : i + 1024], positions[i : i + 1024], k, exclude_seen)
            for i in range(0, len(wanted), 1024)
        ]
        return pl.concat(frames) if frames else self._frame([], np.empty((0, k), np.int32), np.empty((0, k)))

    def score(self, users: Sequence[Id] | Id, items: Sequence[Id] | Id) -> pl.DataFrame:
        """Scores of every given user for every given item: columns user, item, score.

        users, items: one id or several; unknown ones are refused by name.
        """
        self._check_fitted()
        who, what = _as_list(users), _as_list(items)
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
        what = _as_list(items)
        rows = self.items_.require(what)
        vectors = np.ascontiguousarray(self.method_.vectors(self.state_), dtype=np.float64)
        length = np.maximum(np.linalg.norm(vectors, axis=1), 1e-12)
        cosine = (vectors[rows] @ vectors.T) / np.outer(length[rows], length)
        cosine[np.arange(rows.size), rows] = -np.inf
        top = top_items(cosine, k)
        return self._frame(what, top, np.take_along_axis(cosine, np.maximum(top, 0), axis=1)).rename({"user": "to"})

    def explain(self, user: Id, item: Id) -> pl.DataFrame:
        """Which items of a user's history speak for an item, and how much: columns item, share of the score, title.

        For methods that score by items of the history (ease, itemknn, mosaic); the largest shares first.
        """
        self._check_fitted()
        (who,), (what,) = self.users_.require([user]), self.items_.require([item])
        form = self.method_
        if not isinstance(form, ClosedForm):
            raise SettingsError(f"{self.method} does not score by items of the history; ease, itemknn and mosaic do")
        history = self.training_.held.take(np.array([who]))
        shares = np.asarray(form.shares(self.state_, history, int(what)), dtype=np.float64)
        order = np.argsort(-shares, kind="stable")
        places = history.items.values[order]
        columns = {"item": self.items_.take(places), "share": shares[order]}
        if self.info_ is not None:
            columns["title"] = self.info_["title"].gather(places)
        return pl.DataFrame(columns)

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
        write_json(place / "model.json", {"format": FORMAT, "params": self.get_params()})
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
        model.restore(Catalogue.load(place), None)
        if binding != model._binding():
            raise ForeignError(
                f"{place / 'state.safetensors'} belongs to another model (method, settings or items differ)"
            )
        model.state_ = model.method_.unpack(arrays, str(place / "state.safetensors"))
        return model

    def _top(self, wanted: Sequence[Id], positions: I64, k: int, exclude_seen: bool) -> pl.DataFrame:
        known = np.flatnonzero(positions >= 0)
        counts = np.bincount(self.training_.histories.values, minlength=len(self.items_)).astype(np.float64)
        scores = np.tile(counts, (positions.size, 1))
        if known.size:
            scores[known] = self._scores(positions[known])
            if exclude_seen:
                seen = self.training_.histories.take(positions[known])
                scores[known[seen.rows], seen.values] = -np.inf
        top = top_items(scores, k)
        return self._frame(wanted, top, np.take_along_axis(scores, np.maximum(top, 0), axis=1))

    def _scores(self, positions: I64) -> npt.NDArray[np.floating]:
        return checked_scores(self.method_.scorer(self.training_, self.state_), positions, len(self.items_))

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


def _as_list(ids: Iterable[Id] | Id) -> list[Id]:
    if isinstance(ids, str | int | np.integer):
        return [ids]
    if isinstance(ids, Mapping):
        raise SettingsError("give ids as one value or a list")
    return list(ids)
