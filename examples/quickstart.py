"""Reference recommenders on MovieLens-100K, honestly evaluated, and ten films for one user."""

from __future__ import annotations

import time
from typing import Any

from fedmosaic import FederatedRecommender, leave_one_out, load
from fedmosaic.cli import note_licence
from fedmosaic.report.console import print_results, print_table

USER = "196"


def main() -> None:
    note_licence("ml-100k", None)
    films = load("ml-100k")
    split = leave_one_out(films)
    rows: list[tuple[str, Any]] = []
    for method in ("popularity", "itemknn", "ials", "ease"):
        began = time.perf_counter()
        model = FederatedRecommender(method).fit(split)
        result = model.evaluate()
        if not rows and result.sampled is not None:
            rows.append(("chance", {"full": result.full.chance().table(), "sampled": result.sampled.chance().table()}))
        rows.append((f"{method} ({time.perf_counter() - began:.1f} s)", result.summary()))
    print_results("MovieLens-100K, strict pool, leave-one-out, seed 0 (percent)", rows)

    model = FederatedRecommender("ease").fit(films)  # to recommend, learn from everything
    lists = model.recommend(USER, k=10)
    print_table(f"for user {USER}", ["rank", "title"], [[str(r["rank"]), r["title"]] for r in lists.to_dicts()])


if __name__ == "__main__":
    main()
