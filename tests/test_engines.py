"""Engines: central methods on every one of them, and the store that keeps devices' rows between rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fedmosaic.engines.devices import Place

from fedmosaic.algorithm.parameters import Axis
from fedmosaic.core.ragged import Ragged
from fedmosaic.engines import devices
from fedmosaic.engines.fused import linear as kernel
from fedmosaic.methods import registry
from fedmosaic.testing import check_engines, toy_training_set


@pytest.mark.parametrize("batch_size", [7, 16, 1024])
@pytest.mark.parametrize("name", ["mf", "ncf"])
def test_engine_law_of_central_methods(name: str, batch_size: int) -> None:
    given = {"dim": 4, "batch_size": batch_size, "local_epochs": 2, "decay": 0.01, "negatives": 3}
    federation = registry.entry(name).build(given)
    assert kernel.unfit(federation.algorithm, toy_training_set().pooled()) == ""
    check_engines(federation)


def test_a_store_with_decay_is_a_dense_table_that_decays() -> None:
    """Strong decay, so that factors are folded into stored rows many times; cohorts and rows change every round."""
    rng, clients, items = np.random.default_rng(0), 6, 9
    first = rng.standard_normal((items, 2)).astype(np.float32)
    dense = np.tile(first.astype(np.float64), (clients, 1, 1))
    state: dict[str, Any] = {}
    every = Ragged.from_rows([list(range(items))] * clients)
    whole = Place(np.arange(clients), Ragged.from_rows([[c] for c in range(clients)]), every, items)
    for _ in range(12):
        cohort = np.sort(rng.choice(clients, 4, replace=False))
        factor = (10.0 ** -rng.uniform(2, 5, cohort.size)).astype(np.float32)
        touched = Ragged.from_rows([sorted(rng.choice(items, 3, replace=False)) for _ in cohort])
        place = Place(cohort, Ragged.from_rows([[c] for c in cohort]), touched, items)
        values = rng.standard_normal((touched.values.size, 2)).astype(np.float32)
        dense[cohort] *= factor[:, None, None]
        dense[cohort[touched.rows], touched.values] = values
        held = {"own": [(Axis.ITEM, place, values)], "own.scale": [(Axis.WHOLE, place, factor)]}
        devices.write(state, held, clients, clients)
        found = devices.read(state, "own", Axis.ITEM, whole, np.tile(first, (clients, 1)))
        np.testing.assert_allclose(found.reshape(dense.shape), dense, rtol=2e-5, atol=1e-30)
    assert (state["own.scale"][:, 0] > 1e-12).all()
