"""A method of one's own in 20 lines: FedMF whose devices are held near the table they received (as in FedProx).

    loss = cross-entropy + strength · mean (row - row received)²

Everything comes from one place, `fedmosaic.extend`. As a file it is a method of the command line:

    fedmosaic run near ml-100k --import examples/own_algorithm.py
    fedmosaic compare fedmf near --data ml-100k --import examples/own_algorithm.py

Run by itself, it holds the method to the laws that every method keeps, and compares it with FedMF.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from fedmosaic import extend as fm


class NearSettings(fm.LinearSettings):
    """FedMF's settings and one more."""

    strength: float = Field(default=0.01, ge=0, description="weight of the distance to the table received")


@dataclass(frozen=True)
class Near:
    """Cross-entropy plus strength · mean squared distance of the batch's rows to those received."""

    strength: float

    def __call__(self, model: fm.Model, view: fm.View, batch: fm.Batch, ctx: fm.Context) -> Any:
        gap = view.rows("item", batch.items) - view.received("item", batch.items)
        return fm.bce(model, view, batch, ctx) + self.strength * fm.mean(gap.square().mean(-1), batch)


def near(s: NearSettings) -> fm.Federation:
    return fm.federation(s, replace(fm.linear(s), objective=Near(s.strength)))


fm.register(fm.Entry("near", "FedMF, held near the table received", "this file", NearSettings, near))


def main() -> None:
    import argparse

    from fedmosaic import FederatedRecommender, leave_one_out, load
    from fedmosaic.report.console import print_results

    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset", default="ml-100k")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    small = near(NearSettings(dim=4, batch_size=16, item_rate=2.0))
    for check in (fm.check_engines, fm.check_chunks, fm.check_privacy):
        check(small)
    split = leave_one_out(load(args.dataset))
    rows = []
    for method in ("fedmf", "near"):
        model = FederatedRecommender(method, rounds=args.rounds).fit(split)
        rows.append((method, model.evaluate().summary()))
    print_results(f"{args.dataset}, strict pool, {args.rounds} rounds (percent)", rows)


if __name__ == "__main__":
    main()
