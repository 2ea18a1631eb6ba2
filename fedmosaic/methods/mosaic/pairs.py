"""Compiled sums of the next-item method. Imported where they are first used: Numba takes its time.

For one history with moments s = 0, 1, ... (events of one time are one moment, and have no order among themselves), n_s
events each, at places tau_s:

    h_s = sum over events p of moments before s of exp(-(tau_s - tau_p)) e_p
    x_t = h_s + e_p of the events p of s that come before t        what stands before event t of moment s

    A = sum_t x_t x_t'     A[p, q] = exp(-(tau_q - tau_p)) (S_q + (n_q - 1) / 2)                p before q
                           A[p, q] = S_q + (n_q - 2) / 3, A[p, p] = S_p + (n_p - 1) / 2         p and q of one moment
                           S_q = sum over moments s after q of n_s exp(-2 (tau_s - tau_q))
    C = sum_t x_t e_t'     C[p, t] = exp(-(tau_t - tau_p)) before, 1/2 in one moment, 0 for p = t

which are the means over all orders that the events of a moment can have: of three events of one moment, one comes
after both others in a third of the orders.

Every pair of events is one addition, and pairs further apart than `FAR` are left out: O(events · window) instead of
the O(events · items²) of the definition. Each client's numbers are rounded to multiples of 2^-24, which float64 adds
exactly: a sum does not depend on who is added first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmosaic.core.compiler import entry, piece

FAR = 6.907755  # exp(-FAR) = 0.001
GRID = float(1 << 24)


@piece(inline="always")
def _grid(value: Any) -> Any:
    return np.floor(value * GRID + 0.5) / GRID


@piece()
def places(times: Any, begin: Any, end: Any, by_moment: Any, by_event: Any, tau: Any, count: Any, first: Any) -> Any:
    """Per event its place tau and its moment's number of events and first event; the place of what comes next."""
    moment, at = 0, begin
    while at < end:
        stop = at + 1
        while stop < end and times[stop] == times[at]:
            stop += 1
        place = moment / by_moment + (at - begin + (stop - at - 1) / 2) / by_event
        for k in range(at, stop):
            tau[k - begin], count[k - begin], first[k - begin] = place, stop - at, at - begin
        moment += 1
        at = stop
    return moment / by_moment + (end - begin) / by_event


@entry()
def stand(offsets: Any, times: Any, decay: Any, events: Any) -> None:
    """Fill in where every event of all histories stands.

    decay: (moments, events) within which a weight falls by e. events: per event its tau, S, its moment's number of
    events and first event, and where its history ends.
    """
    tau, tail, count, first, end = events
    for user in range(offsets.size - 1):
        begin, stop = offsets[user], offsets[user + 1]
        own_tau, own_count, own_first = tau[begin:stop], count[begin:stop], first[begin:stop]
        places(times, begin, stop, decay[0], decay[1], own_tau, own_count, own_first)
        _tails(stop - begin, own_tau, own_count, own_first, tail[begin:stop])
        own_first += begin
        end[begin:stop] = stop


@entry()
def add_pairs(
    items: Any, places: Any, events: Any, order: Any, starts: Any, before: Any, after: Any, low: Any, high: Any
) -> None:
    """Add C to `after`, and to `before` a matrix that with its mirror image makes A, for all histories.

    places: per event the place of its item among those that predict, or -1. events: what `stand` filled in. order:
    events by the place of their item, those of place p at starts[p] .. starts[p + 1]. low, high: only rows of these
    places are added to, so that threads can share the work: a pair stands in the row of its earlier event. A row is
    done before the next is begun, so that it stays in the cache.
    """
    tau, tail, count, first, end = events
    for row in range(low, high):
        behind, beside = after[row], before[row]
        for k in range(starts[row], starts[row + 1]):
            p = order[k]
            at, near = first[p], count[p]
            beside[row] += _grid(tail[p] + (near - 1) / 2) / 2  # a half: its mirror image is the other
            square = _grid(tail[p] + (near - 2) / 3)
            for q in range(at, at + near):
                if q != p:
                    behind[items[q]] += 0.5
                    other = places[q]
                    if q > p and other >= 0:
                        beside[other] += square
            q = at + near
            while q < end[p] and tau[q] - tau[p] <= FAR:
                weight, stop = np.exp(-(tau[q] - tau[p])), q + count[q]
                part, square = _grid(weight), _grid(weight * (tail[q] + 0.5 * (count[q] - 1)))
                while q < stop:
                    behind[items[q]] += part
                    other = places[q]
                    if other >= 0:
                        beside[other] += square
                    q += 1


@piece()
def _tails(length: Any, tau: Any, count: Any, first: Any, tail: Any) -> None:
    """tail[q] <- S_q, moment by moment from the end."""
    total, last, at = 0.0, length, length - 1
    while at >= 0:
        if last < length:
            total = (total + count[last]) * np.exp(-2 * (tau[last] - tau[at]))
        for k in range(first[at], at + 1):
            tail[k] = total
        last = first[at]
        at = last - 1


@entry()
def next_weights(offsets: Any, times: Any, decay: Any, out: Any) -> None:
    """out[k] <- exp(-(tau_next - tau_k)): what event k of a history weighs for the item that comes next."""
    longest = 0
    for user in range(offsets.size - 1):
        longest = max(longest, offsets[user + 1] - offsets[user])
    tau = np.empty(longest, np.float64)
    count, first = np.empty(longest, np.int64), np.empty(longest, np.int64)
    for user in range(offsets.size - 1):
        begin, end = offsets[user], offsets[user + 1]
        now = places(times, begin, end, decay[0], decay[1], tau, count, first)
        for k in range(end - begin):
            gap = now - tau[k]
            out[begin + k] = np.exp(-gap) if gap <= FAR else 0.0


@entry()
def add_bounded(items: Any, offsets: Any, times: Any, decay: Any, inputs: Any, after: Any) -> None:
    """Add C, of pairs of items that predict, to `after` for all histories, each scaled to a norm of at most 1.

    An item counts once per history, at its first event; numbers are rounded towards zero, so that the bound holds.
    """
    longest = 0
    for user in range(offsets.size - 1):
        longest = max(longest, offsets[user + 1] - offsets[user])
    tau = np.empty(longest, np.float64)
    count, first = np.empty(longest, np.int64), np.empty(longest, np.int64)
    place, last = np.empty(longest, np.int64), np.full(inputs.size, -1, np.int64)  # by whom an item was last met
    for user in range(offsets.size - 1):
        begin = offsets[user]
        length = offsets[user + 1] - begin
        places(times, begin, begin + length, decay[0], decay[1], tau, count, first)
        for k in range(length):
            item = items[begin + k]
            place[k] = inputs[item] if last[item] != user else -1
            last[item] = user
        norm = 0.0
        for adding in range(2):
            scale = 1 / max(1.0, np.sqrt(norm))
            for q in range(length):
                for p in range(q - 1, -1, -1):
                    gap = tau[q] - tau[p]
                    if gap > FAR:
                        break
                    if place[p] < 0 or place[q] < 0:
                        continue
                    same = first[p] == first[q]
                    weight = 0.5 if same else np.exp(-gap)
                    if adding:
                        part = np.floor(weight * scale * GRID) / GRID
                        after[place[p], place[q]] += part
                        if same:
                            after[place[q], place[p]] += part
                    else:
                        norm += weight * weight * (2 if same else 1)
