"""The factored form: r numbers per item instead of one per pair of items, for any catalogue.

The server publishes bases Q_s and Q_e (a row of r numbers per item that predicts) and asks for A Q_s and G Q_e, sums of
items x r. Randomised subspace iteration: what comes back spans the next, better basis. After `passes` of them the last
round asks for C'Q_s too, and

    B_s = Q_s (Q_s'A Q_s + lam I)^-1 Q_s'C
    G = U diag(g) U' within Q_e;  P = (G + lam I)^-1 = (I - U diag(h) U') / lam,  h = g / (g + lam)
    B_e = U diag(h) U' / (1 - sum U² h)     EASE of that G: the diagonal, left standing, speaks only for items seen

Q_s spans the leading directions of D A D, D = 1 / sqrt(events + DAMPED), because directions of A itself are those of
popular items; Q_e those of G. The first bases are random numbers that everybody knows, so that nothing is left to luck.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmosaic.core.threads import deal, thread_count
from fedmosaic.data.histories import Histories
from fedmosaic.methods.closed_form import State, Statistics
from fedmosaic.methods.mosaic.full import ridge

F32 = npt.NDArray[np.float32]
DAMPED = 100.0


def first_bases(state: State, rank: int) -> State:
    """Random bases for as many items as predict others."""
    k = int(state["inputs"].max()) + 1
    drawn = np.random.default_rng(0).standard_normal((2, k, min(rank, k)), dtype=np.float32)
    return {**state, "basis": _damped(state, drawn[0]), "taste_basis": _orthonormal(drawn[1])}


def sums(state: State, held: Histories, events: float, *, last: bool) -> Statistics:
    """A Q_s (of the first window, while bases are sought) and G Q_e; in the end C'Q_s too, for every window."""
    from fedmosaic.methods.mosaic.scans import project, project_together

    inputs, distinct = state["inputs"], held.items.unique()
    basis, taste = state["basis"], state["taste_basis"]
    found: Statistics = {"together": np.zeros(taste.shape)}
    _by_columns(taste, [found["together"]], partial(project_together, distinct.values, distinct.offsets, inputs))
    for window in state["windows"] if last else state["windows"][:1]:
        before, after = np.zeros(basis.shape), np.zeros((held.n_items if last else 0, basis.shape[1]))
        if held.times is not None:
            decay = np.array([window, events])
            work = partial(project, held.items.values, held.items.offsets, held.times, decay, inputs)
            _by_columns(basis, [before, after], work)
        found[f"before {window:g}"] = before
        if last:
            found[f"after {window:g}"] = after
    return found


def better_bases(state: State, total: Statistics) -> State:
    """What came back, orthonormal; where nothing did (no times), the basis stays."""
    before = total[f"before {state['windows'][0]:g}"]
    if before.any():
        state = {**state, "basis": _damped(state, before.astype(np.float32))}
    return {**state, "taste_basis": _orthonormal(total["together"].astype(np.float32))}


def solved(state: State, total: Statistics, lam: float, taste_lam: float) -> State:
    """B_s for every window and B_e, each as a product of two thin matrices."""
    basis, taste = state["basis"], state["taste_basis"]
    sequence = []
    for window in state["windows"]:
        gram = basis.T.astype(np.float64) @ total.pop(f"before {window:g}")
        sequence.append(ridge((gram + gram.T) / 2, total.pop(f"after {window:g}").T, lam))
    inner = taste.T.astype(np.float64) @ total["together"]
    sizes, turn = np.linalg.eigh((inner + inner.T) / 2)
    share = np.maximum(sizes, 0) / (np.maximum(sizes, 0) + taste_lam)
    leading = taste @ turn.astype(np.float32)
    left = np.maximum(1 - (leading**2) @ share, 1e-3).astype(np.float32)
    return {
        **state,
        "sequence": np.stack(sequence),
        "taste_basis": leading * share.astype(np.float32),
        "co": np.ascontiguousarray((leading / left[:, None]).T),
    }


def _damped(state: State, rows: F32) -> F32:
    """An orthonormal basis of D (orthonormal basis of D rows)."""
    some = state["inputs"] >= 0
    damp = (1 / np.sqrt(state["events"][some] + DAMPED)).astype(np.float32)[:, None]
    return _orthonormal(damp * _orthonormal(damp * rows))


def _orthonormal(rows: F32) -> F32:
    """rows R^-1 with R'R = rows'rows, twice, because the first loses digits; a QR would be many small steps."""
    from scipy import linalg

    for _ in range(2):
        gram = np.asarray(rows.T @ rows, np.float64)
        gram[np.diag_indices_from(gram)] += 1e-7 * np.trace(gram) / len(gram)
        upper = linalg.cholesky(gram, check_finite=False)
        rows = rows @ linalg.solve_triangular(upper, np.eye(len(gram)), check_finite=False).astype(np.float32)
    return rows


def _by_columns(basis: F32, totals: list[Any], work: Callable[..., None]) -> None:
    """work(columns of basis, columns of every total), dealt to threads; columns do not depend on each other."""
    workers = thread_count()
    cuts = np.linspace(0, basis.shape[1], workers + 1).astype(np.int64)

    def share(worker: int) -> None:
        low, high = cuts[worker], cuts[worker + 1]
        parts = [np.ascontiguousarray(t[:, low:high]) for t in totals]
        work(np.ascontiguousarray(basis[:, low:high]), *parts)
        for whole, part in zip(totals, parts, strict=True):
            whole[:, low:high] = part

    deal(share, workers)
