"""The compiled loop over clients with a network; net.py explains and calls it."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmosaic.core.compiler import entry, piece
from fedmosaic.core.fixed_point import LIMIT, SCALE
from fedmosaic.data.compiled import shuffle_client
from fedmosaic.engines.fused.net_pieces import answer, net_step
from fedmosaic.engines.fused.pieces import FAST, add, choose, flush, load, meet
from fedmosaic.engines.fused.skeleton import GROUP


@piece()
def _send(before: Any, after: Any, total: Any) -> Any:
    """Add a client's change of the network in fixed point; false if it holds what no training should."""
    healthy = True
    for i in range(after.size):
        change = after[i] - before[i]
        healthy &= abs(change) < LIMIT
        total[i] += np.int64(np.floor(np.float64(change) * SCALE + 0.5))
    return healthy


@entry(fastmath=FAST)
def train(
    worker: Any, workers: Any, cohort: Any, passes: Any, table: Any, room: Any, tower: Any, sums: Any, net_total: Any
) -> Any:  # fmt: skip
    """The groups of clients dealt to one worker; `table`: item rows, user vectors, networks, shared or not, widths."""
    item, user, nets, shared, widths = table
    count, dim, u, net, healthy = cohort.clients.size, item.shape[1], room.w, tower.net, True
    for group in range(worker, (count + GROUP - 1) // GROUP, workers):
        held = 0
        for c in range(group * GROUP, min((group + 1) * GROUP, count)):
            positives, n, n_rows = meet(cohort, c, room)
            load(item, room, n_rows)
            for d in range(dim):
                u[d] = user[c, d]
            begins = nets[0] if shared else nets[c]
            for i in range(net.size):
                net[i] = begins[i]
            loss, seen, turn = 0.0, 0, 0
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
                            loss += net_step(start, k, room, tower, widths, passes.rates[phase], first)
            sums.losses[c], sums.seen[c] = loss, seen
            held = add(item, room, n_rows, held, sums.touched)
            for d in range(dim):
                user[c, d] = u[d]
            if shared:
                healthy &= _send(nets[0], net, net_total)
            else:
                for i in range(net.size):
                    nets[c, i] = net[i]
            answer(cohort, c, item, widths, room, tower, sums.answers)
        healthy &= flush(room, held, sums.total)
    return healthy
