"""The recommender people hold: fit, recommend, score, similar_items, evaluate, save, load. Ids in, ids out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from fedmosaic.core.errors import RunError, SettingsError
from fedmosaic.core.files import load_tensors, read_json, save_tensors, write_json
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.clean import as_polars
from fedmosaic.data.interactions import Interactions
from fedmosaic.data.negatives import Candidates, Pool, draw_candidates, excluded_items
from fedmosaic.data.split import Part, Split
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.data.vocab import Id, Vocab
from fedmosaic.evaluation.evaluate import Evaluation, checked_scores, evaluate, make_probe, rank_probe, top_items
from fedmosaic.methods import registry
from fedmosaic.training.method import Method, Progress, State, train

FORMAT = 1
Users = Sequence[Id] | Id | None


class FederatedRecommender:
    """A method of the catalogue, trained on interactions and answering in the ids they came with.

    >>> shop = {"customer": ["ann", "ann", "bob", "bob", "cem"], "sku": ["tea", "cup", "tea", "pot", "tea"]}
    >>> model = FederatedRecommender("itemknn").fit(Interactions.from_frame(shop, user="customer", item="sku"))
    >>> model.recommend("cem", k=2)["item"].to_list()
    ['cup', 'pot']
    """

    def __init__(self, method: str = "ease", *, seed: int = 0, pool: Pool = "strict", **settings: Any) -> None:
        self.method, self.seed, self.pool, self.settings = method, seed, pool, settings
        self.method_: Method = registry.entry(method).build(settings)

    def get_params(self) -> dict[str, Any]:
        """Arguments of the constructor, as given."""
        return {"method": self.method, "seed": self.seed, "pool": self.pool, **self.settings}

    def fit(self, data: Interactions | Split | Any, progress: Progress | None = None) -> FederatedRecommender:
        """Train on everything (`Interactions`, or a table with columns user and item), or on a split's train part.

        Given a split, a method that reports every round keeps the round with the best validation HR@10 (1 + 99).
        """
        if isinstance(data, Split):
            self.split_: Split | None = data
            known = data.interactions
            training = training_set(data, self.pool)
        else:
            known = data if isinstance(data, Interactions) else Interactions.from_frame(as_polars(data))
            self.split_ = None
            histories = Ragged.group(known.user, known.item, len(known.users))
            training = TrainingSet(histories, histories.unique(), len(known.items))
        return self.restore(known.users, known.items, known.info, training, self._train(training, progress))

    def _train(self, training: TrainingSet, progress: Progress | None) -> State:
        state: State = {}
        split, probe, best = self.split_, None, -1.0
        if split is not None and split.validation.values.size:
            probe = make_probe(split, "validation", draw_candidates(split))
        for step in train(self.method_, training, self.seed, probe=probe):
            line = vars(step.record)
            if split is None or probe is None or step.answers is None:
                state = step.state
            else:
                found = rank_probe(step.answers, probe, split.validation).mean("hr", 10)
                line = line | {"validation": {"sampled": {"hr@10": found}}}
                if found >= best:
                    state, best = step.state, found
            if progress is not None:
                progress(step.round, self.method_.rounds, line)
        return state

    def restore(
        self, users: Vocab, items: Vocab, info: pl.DataFrame | None, training: TrainingSet, state: State
    ) -> FederatedRecommender:
        """Take over a trained state (used by `fit`, `load` and run folders)."""
        self.users_, self.items_, self.info_, self.training_, self.state_ = (
            users,
            items,
            info,
            training,
            state,
        )
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

        One id, several, or all users (none given). A user the model has not met gets the most popular items, with a
        warning, or is an error (`on_unknown="error"`).
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
        """Scores of every given user for every given item: columns user, item, score."""
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
        """Items alike in the model's own terms: columns to, rank, item, score (cosine), and title where known."""
        self._check_fitted()
        what = _as_list(items)
        rows = self.items_.require(what)
        vectors = np.ascontiguousarray(self.method_.vectors(self.state_), dtype=np.float64)
        length = np.maximum(np.linalg.norm(vectors, axis=1), 1e-12)
        cosine = (vectors[rows] @ vectors.T) / np.outer(length[rows], length)
        cosine[np.arange(rows.size), rows] = -np.inf
        top = top_items(cosine, k)
        return self._frame(what, top, np.take_along_axis(cosine, np.maximum(top, 0), axis=1)).rename({"user": "to"})

    def evaluate(self, part: Part = "test", *, candidates: int = 99, candidate_seed: int = 0) -> Evaluation:
        """Rank the held-out items of the split this model was fitted on."""
        self._check_fitted()
        if self.split_ is None:
            raise RunError("fitted on everything, so nothing is held out; fit on a split, e.g. leave_one_out(data)")
        lists = draw_candidates(self.split_, candidates, seed=candidate_seed)
        return evaluate(self.method_.scorer(self.training_, self.state_), self.split_, part, lists)

    def save(self, folder: str | Path) -> Path:
        """Write the model: settings, vocabularies, histories, tensors. No pickle."""
        self._check_fitted()
        place = Path(folder)
        save_catalogue(place, self.users_, self.items_, self.info_, self.training_)
        save_tensors(place / "state.safetensors", self.state_)
        write_json(place / "model.json", {"format": FORMAT, "params": self.get_params()})
        return place

    @classmethod
    def load(cls, folder: str | Path) -> FederatedRecommender:
        """Read a saved model; it gives the same recommendations."""
        place = Path(folder)
        described = read_json(place / "model.json")
        if described.get("format") != FORMAT:
            raise RunError(f"{place} has format {described.get('format')!r}; this version reads {FORMAT}")
        model = cls(**described["params"])
        model.split_ = None
        state, _ = load_tensors(place / "state.safetensors")
        return model.restore(*load_catalogue(place), state)

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
        if not hasattr(self, "state_"):
            raise RunError("this recommender is not trained yet; call fit(...) first")


def training_set(split: Split, pool: Pool, candidates: Candidates | None = None) -> TrainingSet:
    """What training may see of a split under a negative pool (`isolated` needs to know the candidate lists)."""
    if pool == "isolated" and candidates is None:
        candidates = draw_candidates(split)
    return TrainingSet(split.train, excluded_items(split, pool, candidates), split.n_items)


def save_catalogue(place: Path, users: Vocab, items: Vocab, info: pl.DataFrame | None, training: TrainingSet) -> None:
    """Vocabularies, titles and histories: what turns tensors back into answers."""
    place.mkdir(parents=True, exist_ok=True)
    users.ids.alias("user").to_frame().write_parquet(place / "users.parquet")
    table = items.ids.alias("item").to_frame() if info is None else info.with_columns(items.ids.alias("item"))
    table.write_parquet(place / "items.parquet")
    parts = {"histories": training.histories, "excluded": training.excluded}
    if training.silos is not None:
        parts["silos"] = training.silos
    save_tensors(
        place / "histories.safetensors",
        {f"{n}.{k}": getattr(r, k) for n, r in parts.items() for k in ("values", "offsets")},
    )


def load_catalogue(place: Path) -> tuple[Vocab, Vocab, pl.DataFrame | None, TrainingSet]:
    """Read `save_catalogue` back."""
    try:
        users, items = pl.read_parquet(place / "users.parquet"), pl.read_parquet(place / "items.parquet")
    except (FileNotFoundError, pl.exceptions.PolarsError) as error:
        raise RunError(f"{place} holds no readable catalogue: {error}") from None
    tensors, _ = load_tensors(place / "histories.safetensors")
    stored = {n: Ragged(tensors[f"{n}.values"], tensors[f"{n}.offsets"]) for n in _parts(tensors)}
    training = TrainingSet(stored["histories"], stored["excluded"], items.height, stored.get("silos"))
    info = items if "title" in items.columns else None
    return Vocab(users["user"], "user"), Vocab(items["item"], "item"), info, training


def _parts(tensors: Mapping[str, Any]) -> set[str]:
    return {name.split(".")[0] for name in tensors}


def _as_list(ids: Iterable[Id] | Id) -> list[Id]:
    if isinstance(ids, str | int | np.integer):
        return [ids]
    if isinstance(ids, Mapping):
        raise SettingsError("give ids as one value or a list")
    return list(ids)
