"""Histories with a known order, and the next-item method by its definition; shared by its tests."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fedmosaic import Interactions, leave_one_out
from fedmosaic.data.split import Split
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.methods.closed_form import ClosedForm, State

ITEMS = 8


def by_definition(items: list[int], times: list[int], window: float, events: float) -> tuple[Any, Any]:
    """A and C as means over all orders of the events of a moment, from x_t itself."""
    moments = [list(g) for _, g in itertools.groupby(range(len(items)), key=lambda k: times[k])]
    place = {k: c / window + float(np.mean(g)) / events for c, g in enumerate(moments) for k in g}
    a, c, orders = np.zeros((ITEMS, ITEMS)), np.zeros((ITEMS, ITEMS)), 0
    for chosen in itertools.product(*(itertools.permutations(g) for g in moments)):
        order, orders = [k for g in chosen for k in g], orders + 1
        for at, k in enumerate(order):
            x = np.zeros(ITEMS)
            for p in order[:at]:
                x[items[p]] += np.exp(-(place[k] - place[p]))
            a += np.outer(x, x)
            c[:, items[k]] += x
    return a / orders, c / orders


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    items = draw(st.lists(st.integers(0, ITEMS - 1), unique=True, max_size=6))
    return items, sorted(draw(st.lists(st.integers(0, 4), min_size=len(items), max_size=len(items))))


def circle() -> Split:
    """Everybody walks a circle of 40 items, from anywhere, in steps of one or two; some items stand at one time."""
    rng = np.random.default_rng(0)
    rows: dict[str, list[int]] = {"user": [], "item": [], "when": []}
    for user in range(150):
        at, when = int(rng.integers(40)), 0
        for _ in range(12):
            rows["user"].append(user)
            rows["item"].append(at % 40)
            rows["when"].append(when)
            at, when = at + int(rng.integers(1, 3)), when + int(rng.integers(0, 3))
    return leave_one_out(Interactions.from_frame(rows, time="when"))


def trained(form: ClosedForm, data: TrainingSet) -> State:
    """After all its rounds."""
    state = form.start(data, 0)
    for number in range(1, form.rounds + 1):
        if not form.done(state):
            state = form.advance(data, state, number, 0)[0]
    return state
