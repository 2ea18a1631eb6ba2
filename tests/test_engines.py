"""Engines: central methods on every one of them, and the store that keeps devices' rows between rounds."""

from __future__ import annotations

import numpy as np
import pytest

from fedmosaic.algorithm.parameters import Axis
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.choice import ENGINES, holding_of
from fedmosaic.engines.state import DeviceStore, Kept, Piece, Place, read, store
from fedmosaic.methods import registry
from fedmosaic.testing import check_engines, toy_training_set


@pytest.mark.parametrize("batch_size", [7, 16, 1024])
@pytest.mark.parametrize("name", ["mf", "ncf"])
def test_engine_law_of_central_methods(name: str, batch_size: int) -> None:
    pytest.importorskip("torch")
    given = {"dim": 4, "batch_size": batch_size, "local_epochs": 2, "decay": 0.01, "negatives": 3}
    federation = registry.entry(name).build(given)
    assert ENGINES["fused"].refuses(federation.algorithm, holding_of(toy_training_set().pooled())) == ""
    check_engines(federation)


def test_a_store_with_decay_is_a_dense_table_that_decays() -> None:
    """Strong decay, so that factors are folded into stored rows many times; cohorts and rows change every round."""
    rng, clients, items = np.random.default_rng(0), 6, 9
    first = rng.standard_normal((items, 2)).astype(np.float32)
    dense = np.tile(first.astype(np.float64), (clients, 1, 1))
    every = Ragged.from_rows([list(range(items))] * clients)
    data, held = TrainingSet(every, every, items), DeviceStore()
    whole = Place(np.arange(clients), data.members(np.arange(clients)), every, items)
    for _ in range(12):
        cohort = np.sort(rng.choice(clients, 4, replace=False))
        factor = (10.0 ** -rng.uniform(2, 5, cohort.size)).astype(np.float32)
        touched = Ragged.from_rows([sorted(rng.choice(items, 3, replace=False)) for _ in cohort])
        place = Place(cohort, data.members(cohort), touched, items)
        values = rng.standard_normal((touched.values.size, 2)).astype(np.float32)
        dense[cohort] *= factor[:, None, None]
        dense[cohort[touched.rows], touched.values] = values
        before = held.rows("own")
        kept = None if before is None else (before.keys.copy(), before.values.copy())
        held = store(held, [Kept({"own": Piece(Axis.ITEM, place, values, factor)})], data)
        if before is not None and kept is not None:  # arrays are replaced, never changed in place
            assert np.array_equal(before.keys, kept[0])
            assert np.array_equal(before.values, kept[1])
        found = read(held.rows("own"), Axis.ITEM, whole, np.tile(first, (clients, 1)))
        np.testing.assert_allclose(found.reshape(dense.shape), dense, rtol=2e-5, atol=1e-30)
    rows = held.rows("own")
    assert rows is not None
    assert rows.scale is not None
    assert (rows.scale[:, 0] > 1e-12).all()
