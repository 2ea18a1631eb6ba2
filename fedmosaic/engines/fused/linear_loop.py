"""The compiled loop of the linear scorer: sampling, shuffling, all phases of all batches, the upload, the answers."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmosaic.core.compiler import entry, piece
from fedmosaic.data.compiled import shuffle_client
from fedmosaic.engines.fused.pieces import FAST, add, add_bounded, choose, dots, flush, load, meet, step
from fedmosaic.engines.fused.skeleton import GROUP


@entry(fastmath=FAST)
def train(worker: Any, workers: Any, cohort: Any, passes: Any, table: Any, bounds: Any, room: Any, sums: Any) -> Any:
    """The groups of clients dealt to one worker; `table`: item rows, user vectors, biases, whether there are biases.

    bounds: on a row and on an upload, and per client room for its norm; without room there are none.
    """
    item, user, bias, has_bias = table
    row_bound, bound, norms = bounds
    dim, count, healthy = item.shape[1], cohort.clients.size, True
    for group in range(worker, (count + GROUP - 1) // GROUP, workers):
        held = 0
        for c in range(group * GROUP, min((group + 1) * GROUP, count)):
            positives, n, n_rows = meet(cohort, c, room)
            load(item, room, n_rows)
            for d in range(dim):
                room.w[d] = user[c, d]
            b, loss, seen, turn = bias[c], 0.0, 0, 0
            for one in range(passes.epochs.size):
                for _ in range(passes.epochs[one]):
                    m = choose(n, positives, passes.parts[one], room)
                    shuffle_client(room.code, 0, m, cohort.epoch_keys[turn, c])
                    turn += 1
                    seen += m
                    for start in range(0, m, passes.sizes[one]):
                        k = min(passes.sizes[one], m - start)
                        for phase in range(passes.phase_at[one], passes.phase_at[one + 1]):
                            first = phase == passes.phase_at[one]
                            b, more = step(start, k, room, b, has_bias, passes.rates[phase], first)
                            loss += more
            sums.losses[c], sums.seen[c] = loss, seen
            if norms.size:
                norms[c], fits = add_bounded(item, room, n_rows, (row_bound, bound), sums.touched, sums.total)
                healthy &= fits
            else:
                held = add(item, room, n_rows, held, sums.touched)
            for d in range(dim):
                user[c, d] = room.w[d]
            bias[c] = b
            _answer(cohort, c, item, b, room, sums.answers)
        healthy &= flush(room, held, sums.total)
    return healthy


@piece(fastmath=FAST)
def _answer(cohort: Any, c: Any, item: Any, b: Any, room: Any, answers: Any) -> None:
    """Scores of what a client is asked; rows it tuned answer for themselves."""
    begin, end = cohort.query_at[c], cohort.query_at[c + 1]
    asked, answer = cohort.query[begin:end], answers[begin:end]
    dots(asked, asked.size, item, room.w, b, answer)
    for k in range(asked.size):
        j = np.uint32(asked[k])
        if room.owner[j] == c:
            row, s = room.rows[np.uint32(room.place[j])], b
            for d in range(room.w.size):
                s += room.w[d] * row[d]
            answer[k] = s


@entry()
def pairs(item: Any, user: Any, bias: Any, query: Any, query_at: Any, scores: Any) -> None:
    """w·e + b for the items asked of each user, flat like the query."""
    for u in range(query_at.size - 1):
        begin, end = query_at[u], query_at[u + 1]
        dots(query[begin:end], end - begin, item, user[u], bias[u], scores[begin:end])
