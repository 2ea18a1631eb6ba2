"""A bundle: what a trained model needs to answer from a history, in a small folder that no training code has to read.

bundle.json          the format's version, the method, and the terms that scores are made of
items.json           ids and titles, by position
arrays.safetensors   the terms' arrays
reader.py            a page of NumPy that answers
index.html           a page that answers in a browser: all of the above in one file, nothing is sent anywhere
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from fedmosaic import __version__
from fedmosaic.core.errors import RunError, SettingsError
from fedmosaic.core.files import save_tensors, write_atomic, write_json
from fedmosaic.methods.base import MethodSettings
from fedmosaic.methods.closed_form import State
from fedmosaic.methods.mosaic.method import WINDOWS, Mosaic
from fedmosaic.methods.mosaic.pairs import FAR
from fedmosaic.methods.pair_form import PairForm
from fedmosaic.methods.popularity import Popularity
from fedmosaic.serving.bundle_reader import FORMAT, read_safetensors
from fedmosaic.serving.recommender import FederatedRecommender

LARGE_PAGE = 32 << 20  # bytes of a page that people open without a thought


@dataclass(frozen=True, eq=False)
class LinearForm:
    """Scores as `bundle_reader` makes them: terms with the names of their arrays, and the arrays."""

    terms: list[dict[str, Any]]
    arrays: dict[str, Any]


def linear_form(method: Any, state: State, n_items: int) -> LinearForm:
    """A method's scores as sums over the items of a history, where they are such; refused by name where not."""
    everything = np.arange(n_items, dtype=np.int32)
    if isinstance(method, Popularity):
        return LinearForm([], {"base": np.asarray(state["count"], np.float64)})
    if isinstance(method, PairForm) and method.epsilon is None:
        term = _term("once", "inputs", "", "weights", "inputs")
        arrays = {"base": np.zeros(n_items), "inputs": everything, "weights": state["weights"]}
        return LinearForm([term], arrays)
    if isinstance(method, Mosaic) and not state["tried"].size and not state["lifted"].size:
        return _of_mosaic(method, state, everything)
    extra = ""
    if isinstance(method, Mosaic | PairForm):
        extra = " with these settings (features=, folds= or an epsilon over pairs)"
    name = type(method).__name__.lower() if isinstance(method, MethodSettings) else "this method"
    raise SettingsError(
        f"{name}{extra} does not answer as a sum over the items of a history, so it cannot be exported; mosaic, ease, "
        "itemknn and popularity do"
    )


def _of_mosaic(method: Mosaic, state: State, everything: Any) -> LinearForm:
    inputs = np.asarray(state["inputs"], np.int32)
    predicting = np.flatnonzero(inputs >= 0).astype(np.int32)
    arrays: dict[str, Any] = {"base": np.asarray(state["trend"][0] * state["recent"], np.float64), "inputs": inputs}
    terms = []

    def add(name: str, term: dict[str, Any], left: Any, right: Any, outputs: Any) -> None:
        arrays[name], arrays[f"{name}.to"] = np.ascontiguousarray(right, np.float32), outputs
        if left.size:
            arrays[f"{name}.from"] = np.ascontiguousarray(left, np.float32)
        terms.append(term | {"left": f"{name}.from" if left.size else "", "right": name, "outputs": f"{name}.to"})

    def order(window: float, weight: float = 1.0) -> dict[str, Any]:
        found = _term("order", "inputs", "", "", "", weight)
        return found | {"moments": float(window), "events": float(method.events), "far": float(FAR)}

    if state["sequence"].size and state["sequence"][0].any():
        add("sequence", order(state["windows"][0]), state["basis"], state["sequence"][0], everything)
    if state["soft"][0] and state["soft_map"].size:
        window = WINDOWS[0] if method.auto and "window" not in method.model_fields_set else method.window
        arrays["base"] = arrays["base"] + float(state["soft"][0]) * np.asarray(state["soft_bias"], np.float64)
        add("softmax", order(window, float(state["soft"][0])), np.zeros((0, 0)), state["soft_map"], everything)
    if state["taste"][0] and state["co"].size:
        taste = _term("once", "inputs", "", "", "", float(state["taste"][0])) | {"sqrt": True}
        add("taste", taste, state["taste_basis"], state["co"], predicting)
    return LinearForm(terms, arrays)


def _term(kind: str, inputs: str, left: str, right: str, outputs: str, weight: float = 1.0) -> dict[str, Any]:
    return {
        "kind": kind, "inputs": inputs, "left": left, "right": right, "outputs": outputs, "weight": weight,
        "sqrt": False,
    }  # fmt: skip


def export(model: FederatedRecommender, folder: str | Path, *, page: bool = True) -> Path:
    """Write a trained model as a bundle. page: with the page for browsers.

    >>> shop = {"user": ["ann", "ann", "bob", "bob"], "item": ["tea", "cup", "tea", "pot"]}
    >>> place = export(FederatedRecommender("itemknn").fit(shop), getfixture("tmp_path") / "bundle")
    >>> sorted(p.name for p in place.iterdir())
    ['arrays.safetensors', 'bundle.json', 'index.html', 'items.json', 'reader.py']
    """
    place = Path(folder)
    if place.exists() and (not place.is_dir() or (any(place.iterdir()) and not (place / "bundle.json").is_file())):
        raise RunError(f"{place} exists and is no bundle; choose another folder")
    form = linear_form(model.method_, model.state_, len(model.items_))
    counts = np.bincount(model.training_.histories.values, minlength=len(model.items_))
    form.arrays["popular"] = counts.astype(np.float64)
    titles = model.info_["title"].to_list() if model.info_ is not None else None
    about = {
        "format": FORMAT,
        "made": f"fedmosaic {__version__}",
        "method": model.method,
        "settings": model.settings,
        "timed": model.training_.times is not None,
        "retired": np.flatnonzero(model.catalogue_.retired_mask).tolist(),
        "terms": form.terms,
    }
    items = {"ids": model.items_.ids.to_list(), "titles": titles}
    place.mkdir(parents=True, exist_ok=True)
    save_tensors(place / "arrays.safetensors", form.arrays)
    write_json(place / "items.json", items)
    reader = resources.files("fedmosaic.serving") / "bundle_reader.py"
    write_atomic(place / "reader.py", reader.read_text(encoding="utf-8"))
    write_json(place / "bundle.json", about)
    if page:
        write_atomic(place / "index.html", _page(place, about, items))
    return place


def _page(place: Path, about: dict[str, Any], items: dict[str, Any]) -> str:
    """The bundle and its reader in one file of HTML."""
    arrays = read_safetensors(place / "arrays.safetensors")
    layout, parts, at = {}, [], 0
    for name, array in arrays.items():  # numbers of four bytes: a browser reads them where they lie
        flat = array.astype("<f4" if array.dtype.kind == "f" else "<i4").ravel()
        layout[name] = {"at": at, "shape": list(array.shape), "kind": flat.dtype.kind}
        parts.append(flat.tobytes())
        at += flat.size
    told = json.dumps(about | items | {"layout": layout}).replace("<", "\\u003c")
    template = (resources.files("fedmosaic.serving") / "page.html").read_text(encoding="utf-8")
    return template.replace("{{about}}", told).replace("{{arrays}}", base64.b64encode(b"".join(parts)).decode())
