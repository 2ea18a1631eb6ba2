"""A method of one's own in 20 lines: FedMF whose devices are held near the table they received (as in FedProx).

    loss = cross-entropy + strength · mean (row - row received)²

The conformance kit then checks it against the laws that every method keeps, and the usual recommender runs it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from fedmosaic.methods.hosts import LinearSettings, federation, linear
from pydantic import Field
from torch import Tensor

from fedmosaic import FederatedRecommender, leave_one_out, load
from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.objective import bce, mean
from fedmosaic.algorithm.view import Batch, Model, View
from fedmosaic.engines.federation import Federation
from fedmosaic.methods.registry import Entry, register
from fedmosaic.report.console import print_results
from fedmosaic.testing import check_chunks, check_engines, check_privacy


class NearSettings(LinearSettings):
    """FedMF's settings and one more."""

    strength: float = Field(default=0.01, ge=0, description="weight of the distance to the table received")


@dataclass(frozen=True)
class Near:
    """Cross-entropy plus strength · mean squared distance of the batch's rows to those received."""

    strength: float

    def __call__(self, model: Model, view: View, batch: Batch, ctx: Context) -> Tensor:
        gap = view.rows("item", batch.items) - view.received("item", batch.items)
        return bce(model, view, batch, ctx) + self.strength * mean(gap.square().mean(-1), batch)


def near(s: NearSettings) -> Federation:
    return federation(s, replace(linear(s), objective=Near(s.strength)))


register(Entry("near", "FedMF, held near the table received", "this file", NearSettings, near))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset", default="ml-100k")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    small = near(NearSettings(dim=4, batch_size=16, item_rate=2.0))
    for check in (check_engines, check_chunks, check_privacy):
        check(small)
    split = leave_one_out(load(args.dataset))
    rows = []
    for method in ("fedmf", "near"):
        model = FederatedRecommender(method, rounds=args.rounds).fit(split)
        rows.append((method, model.evaluate().summary()))
    print_results(f"{args.dataset}, strict pool, {args.rounds} rounds (percent)", rows)


if __name__ == "__main__":
    main()
