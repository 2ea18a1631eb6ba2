"""The secure sum: exact for whoever arrived, uniform noise for everybody else, and no second answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmosaic import leave_one_out
from fedmosaic.algorithm.local import Context
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.fixed_point import SCALE
from fedmosaic.data.negatives import training_set
from fedmosaic.data.synthetic import synthetic
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.methods.registry import entry
from fedmosaic.privacy.secure_sum import (
    Pair,
    Party,
    RevealError,
    SumTerms,
    TooFewError,
    arrived,
    letters_to,
    opened,
    simulated,
)

pytest.importorskip("mpyc", reason="secure sums need the extra privacy")
COUNT = 40


def terms(parties: int, **given: Any) -> SumTerms:
    return SumTerms("shop", 3, "table", tuple(range(parties)), **given)


def numbers(seed: int) -> Any:
    """What every party sends: as large as uploads are in fixed point."""
    return lambda party: np.random.default_rng([seed, party]).integers(-(2**50), 2**50, COUNT)


class Hall:
    """Parties of one attempt who have sent; `open_for` asks one of them."""

    def __init__(self, agreed: SumTerms, values: Any, lost: tuple[int, ...] = ()) -> None:
        self.terms, keys = agreed, {i: Pair.new() for i in agreed.parties}
        publics = {i: pair.public for i, pair in keys.items()}
        self.parties = {i: Party.begin(i, keys[i], publics, agreed) for i in agreed.parties if i not in lost}
        self.uploads = {i: party.mask(values(i)) for i, party in self.parties.items()}
        self.letters = {i: upload.letters for i, upload in self.uploads.items()}

    def open_for(self, party: int, here: tuple[int, ...]) -> Any:
        return self.parties[party].open(here, letters_to(party, self.letters, here))

    def masked(self, here: tuple[int, ...]) -> Any:
        return np.sum([self.uploads[i].masked for i in here], axis=0, dtype=self.terms.words)


@settings(max_examples=25, deadline=None)
@given(st.integers(3, 14), st.integers(0, 3), st.integers(0, 2), st.sampled_from([32, 64]), st.integers(0, 999))
def test_the_sum_is_that_of_whoever_arrived_or_nothing(
    parties: int, lost: int, late: int, bits: Any, seed: int
) -> None:
    drawn = np.random.default_rng(seed).permutation(parties).tolist()
    agreed, small = terms(parties, bits=bits, neighbours=6), 2**20 if bits == 32 else 2**50
    values = {i: np.random.default_rng([seed, i]).integers(-small, small, COUNT) for i in range(parties)}
    try:
        total, here, _ = simulated(values.__getitem__, agreed, drawn[:lost], drawn[lost : lost + late])
    except TooFewError:
        assert lost + late > 0
        return
    assert not set(here) & set(drawn[:lost])
    np.testing.assert_array_equal(total, sum(values[i] for i in here))


@pytest.mark.parametrize("dropped", [0, 10])
def test_a_hundred_parties_and_a_tenth_lost_lose_no_survivor(dropped: int) -> None:
    total, here, _ = simulated(numbers(0), terms(100), lost=range(dropped))
    assert here == tuple(range(dropped, 100))
    np.testing.assert_array_equal(total, sum(numbers(0)(i) for i in here))


def test_with_a_third_lost_nearly_all_others_are_summed() -> None:
    """Who counts follows from the graph alone; 20 draws of the third of 1,000 that is lost."""
    kept = []
    for seed in range(20):
        agreed = replace(terms(1000), round=seed)
        lost = set(np.random.default_rng(seed).permutation(1000)[:333].tolist())
        kept.append(len(arrived(agreed, set(agreed.parties) - lost)) / 667)
    assert min(kept) >= 0.95


def test_what_one_party_sends_is_uniform_and_new_every_time() -> None:
    """Zeros and huge numbers look alike; bits are even; the same numbers masked again share nothing."""
    agreed = replace(terms(5), table="other")
    halls = [Hall(agreed, lambda _, v=v: np.full(4096, v)) for v in (0, 0, 2**40)]
    sent = [hall.uploads[0].masked for hall in halls]
    for one in sent:
        bits = np.unpackbits(one.view(np.uint8))
        assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(bits.size)
    assert not (sent[0] == sent[1]).any()
    near = np.corrcoef([one.astype(np.float64) for one in sent])
    assert np.abs(near[np.triu_indices(3, 1)]).max() < 5 / np.sqrt(4096)


def test_below_the_threshold_shares_say_nothing() -> None:
    """With one share too few, every own seed is as likely as any other: the sum stays masked, and no guess is made."""
    hall = Hall(terms(9), numbers(1))
    here = tuple(range(9))
    openings = {i: hall.open_for(i, here) for i in range(4)}  # thresholds are 5
    with pytest.raises(TooFewError, match="3 shares of the own seed of party 0"):
        opened(hall.terms, hall.masked(here), here, openings)
    shares = [opening.own[8] for opening in openings.values()]
    assert all(0 <= share < 2**128 + 51 for share in shares)
    again = [Hall(terms(9), numbers(1)).open_for(0, here).own[8] for _ in range(8)]
    assert len(set(again)) == 8  # shares of a party are drawn anew every time


@pytest.mark.parametrize(
    "here", [(1, 2, 3, 4), (0, 1), (0, 1, 2), (0, 1, 2, 3, 4, 5, 99)], ids=["not me", "few", "neighbours", "strange"]
)
def test_a_party_opens_nothing_that_tells_more_than_a_sum(here: tuple[int, ...]) -> None:
    hall = Hall(terms(7), numbers(2))
    with pytest.raises(RevealError):
        hall.parties[0].open(here, letters_to(0, hall.letters, [i for i in here if i < 7]))


def test_a_party_opens_one_seed_of_another_never_both() -> None:
    hall = Hall(terms(7), numbers(3), lost=(6,))
    here = arrived(hall.terms, hall.uploads)
    opening = hall.open_for(0, here)
    assert set(opening.own) == {1, 2, 3, 4, 5}
    assert set(opening.lost) == {6}
    assert {d for _, d in opening.theirs} == {6}


def test_a_letter_of_another_attempt_or_reader_is_refused() -> None:
    hall, other = Hall(terms(5), numbers(4)), Hall(replace(terms(5), round=4), numbers(4))
    here, others = tuple(range(5)), {1: 2, 2: 3, 3: 4, 4: 1}
    for letters in (
        {i: other.letters[i][0] for i in others},
        {i: hall.letters[i][reader] for i, reader in others.items()},
    ):
        with pytest.raises(RevealError, match="was not sealed"):
            hall.parties[0].open(here, letters)


def test_all_messages_of_a_round_have_one_length() -> None:
    hall = Hall(terms(30, neighbours=8), numbers(5))
    assert len({upload.nbytes for upload in hall.uploads.values()}) == 1


def test_terms_that_mean_nothing_are_refused() -> None:
    for wrong in ({"least": 2}, {"least": 9}, {"neighbours": 3}):
        with pytest.raises(SettingsError):
            terms(5, **wrong)
    with pytest.raises(SettingsError, match="ascending"):
        SumTerms("shop", 1, "", (2, 1, 3))


@pytest.fixture(scope="module")
def data() -> TrainingSet:
    return training_set(leave_one_out(synthetic(24, 40, 8, seed=1)), "strict")


@pytest.mark.parametrize("method", ["fedmf", "pfedrec", "fedrap", "fedrecon", "fedncf"])
def test_a_masked_round_has_the_bits_of_a_plain_one(method: str, data: TrainingSet) -> None:
    """Clients that work one at a time send the same numbers, masked or not, so the model is the same."""
    states = []
    for secure in (False, True):
        federation = entry(method).build({"engine": "loop", "secure": secure, "dim": 4})
        state = federation.start(data, 0)
        for number in (1, 2):
            state, record, _ = federation.advance(data, state, number, 0)
        states.append(state)
    assert record.touched_rows is None
    assert record.loss is not None
    for name, value in states[0].server.params.items():
        np.testing.assert_array_equal(value, states[1].server.params[name])


@pytest.mark.parametrize("method", ["fedmf", "pfedrec"])
def test_a_sum_modulo_32_bits_is_that_of_rounded_uploads(method: str, data: TrainingSet) -> None:
    """Half the bytes; the model moves by no more than rounding does; no sum wraps around."""
    states, records = {}, {}
    for bits in (64, 32):
        federation = entry(method).build({"secure": True, "secure_bits": bits, "upload_clip": 5.0, "dim": 4})
        states[bits], records[bits], _ = federation.advance(data, federation.start(data, 0), 1, 0)
    step = 2.0 ** -(30 - np.ceil(np.log2(data.n_clients * 5.0)))
    for name, value in states[64].server.params.items():
        np.testing.assert_allclose(states[32].server.params[name], value, atol=step + 3e-7, rtol=0)
    assert records[32].loss == pytest.approx(records[64].loss, abs=0.01)
    numbers = states[64].server.params["item"].size
    assert records[64].bytes_up - records[32].bytes_up >= 4 * numbers  # what else is sent are shares
    with pytest.raises(SettingsError, match="give upload_clip"):
        entry(method).build({"secure": True, "secure_bits": 32})


@pytest.mark.parametrize("engine", ["loop", "simulate", "fused"])
def test_rows_and_uploads_keep_their_bounds(engine: str, data: TrainingSet) -> None:
    federation = entry("fedmf").build({"row_clip": 0.01, "upload_clip": 0.02, "engine": engine, "dim": 4})
    ctx = Context(1, 0, data.n_items, data.n_clients)
    for client in range(5):
        _, done = federation.contribute(data, federation.start(data, 0), ctx, np.array([client]))
        rows = np.linalg.norm(done.total.totals["item"] / SCALE, axis=1)
        assert rows.max() <= 0.01 * (1 + 1e-4)
        assert np.linalg.norm(rows) <= 0.02 * (1 + 1e-4)


@pytest.mark.parametrize("method", ["popularity", "itemknn", "ease", "mosaic"])
def test_closed_forms_are_the_same_from_masked_sums(method: str, data: TrainingSet) -> None:
    states = []
    for secure in (False, True):
        form = entry(method).build({"secure": secure})
        state = form.start(data, 0)
        for number in range(1, form.rounds + 1):
            if not form.done(state):
                state, _, _ = form.advance(data, state, number, 0)
        states.append(state)
    for name, value in states[0].items():
        np.testing.assert_array_equal(value, states[1][name])


@pytest.mark.parametrize("method", ["ials", "fcf"])
def test_iterated_closed_forms_are_as_good_as_the_same(method: str, data: TrainingSet) -> None:
    """Their sums are real numbers, which fixed point rounds."""
    found = []
    for secure in (False, True):
        form = entry(method).build({"secure": secure, "rounds": 2, "dim": 4})
        state = form.start(data, 0)
        for number in (1, 2):
            state, _, _ = form.advance(data, state, number, 0)
        found.append(form.scorer(data, state).scores(np.arange(5)))
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


def test_what_a_secure_sum_cannot_hide_is_refused() -> None:
    with pytest.raises(SettingsError, match="nonzero uploads tell rows"):
        entry("fedrap").build({"secure": True, "threshold": 0.1})
