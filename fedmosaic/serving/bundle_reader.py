"""A bundle's reader: NumPy and nothing else. This file is copied into every bundle; read it, or use it as it is.

A bundle answers from a history alone. The score of item j is

    base[j] + sum over terms of  weight · (x L) R[:, j]

where x has a number per item of the history: `once` (the same for all, scaled by the size of the history where `sqrt`
is set), or `order` (falls by e with `moments` moments and `events` events since). L is there in factored models alone.

    >>> Bundle("bundle").recommend(["50", "172"], k=10)                                      # doctest: +SKIP
    [('181', 0.0312), ('174', 0.0284), ...]
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1
Array = Any


class Bundle:
    """A folder of arrays and what they mean."""

    def __init__(self, folder: str | Path) -> None:
        place = Path(folder)
        self.about: dict[str, Any] = json.loads((place / "bundle.json").read_text(encoding="utf-8"))
        if self.about["format"] != FORMAT:
            raise ValueError(f"{place} has format {self.about['format']}; this reader knows {FORMAT}")
        listed = json.loads((place / "items.json").read_text(encoding="utf-8"))
        self.ids: list[Any] = listed["ids"]
        self.titles: list[str | None] = listed["titles"] or [None] * len(self.ids)
        self.place = {str(one): at for at, one in enumerate(self.ids)}
        self.arrays = read_safetensors(place / "arrays.safetensors")

    def recommend(
        self, history: Sequence[Any], k: int = 10, *, times: Sequence[int] | None = None, exclude: Sequence[Any] = ()
    ) -> list[tuple[Any, float]]:
        """The best items that are not in a history: (id, score), best first.

        history: ids, earliest first. times: beside them, if they are known; equal ones mean that the order is not.
        exclude: ids that are not wanted. Unknown ids are left out.
        """
        known = [(self.place[str(one)], at) for at, one in enumerate(history) if str(one) in self.place]
        items = np.array([place for place, _ in known], np.int64)
        moments = np.array([at if times is None else times[at] for _, at in known], np.int64)
        order = np.argsort(moments, kind="stable")
        scores = self.scores(items[order], moments[order])
        closed = [*items.tolist(), *(self.place[str(e)] for e in exclude if str(e) in self.place)]
        scores[np.array(closed + self.about["retired"], np.int64)] = -np.inf
        best = np.lexsort((np.arange(scores.size), -scores))[:k]
        return [(self.ids[j], float(scores[j])) for j in best if np.isfinite(scores[j])]

    def scores(self, items: Array, times: Array) -> Array:
        """Scores of all items, for a history in order of time."""
        if items.size == 0:
            return self.arrays["popular"].astype(np.float64)
        found = self.arrays["base"].astype(np.float64)
        for term in self.about["terms"]:
            inputs, right = self.arrays[term["inputs"]], self.arrays[term["right"]]
            x = self._weights(term, items, times)
            places = inputs[items]
            x, places = x[places >= 0], places[places >= 0]
            row = x @ self.arrays[term["left"]][places] @ right if term["left"] else x @ right[places]
            found[self.arrays[term["outputs"]]] += term["weight"] * row
        return found

    @staticmethod
    def _weights(term: dict[str, Any], items: Array, times: Array) -> Array:
        if term["kind"] == "once":
            first = np.unique(items, return_index=True)[1]
            x = np.zeros(items.size)
            x[first] = 1 / np.sqrt(first.size) if term["sqrt"] else 1.0
            return x
        moment = np.unique(times, return_inverse=True)[1]
        count = np.bincount(moment)
        begin = np.cumsum(count) - count
        tau = moment / term["moments"] + (begin + (count - 1) / 2)[moment] / term["events"]
        gap = count.size / term["moments"] + items.size / term["events"] - tau
        return np.where(gap <= term["far"], np.exp(-gap), 0.0)


def read_safetensors(path: Path) -> dict[str, Array]:
    """Arrays of a safetensors file: eight bytes of length, a header of JSON, numbers."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    kinds = {"F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8"}
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            flat = np.frombuffer(raw[8 + size + low : 8 + size + high], kinds[entry["dtype"]])
            found[name] = flat.reshape(entry["shape"])
    return found
