"""MovieLens-100K: reference recommenders, federated training, honest evaluation, and ten films for one user."""

from __future__ import annotations

import time
from typing import Any

from fedmosaic import FederatedRecommender, leave_one_out, load
from fedmosaic.cli.options import note_licence
from fedmosaic.report.console import print_results, print_table, progress_bar

USER = "196"
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("mosaic", {}),
    ("popularity", {}),
    ("itemknn", {}),
    ("ials", {}),
    ("ease", {}),
    ("pfedrec", {}),
    ("fedmf", {"preset": "scale-free"}),
]


def main() -> None:
    note_licence("ml-100k", None)
    films = load("ml-100k")
    split = leave_one_out(films)
    rows: list[tuple[str, Any]] = []
    models = {}
    for method, settings in METHODS:
        began = time.perf_counter()
        with progress_bar(f"{method:<10}", quiet=False) as progress:
            models[method] = FederatedRecommender(method, **settings).fit(split, progress)
        result = models[method].evaluate()
        if not rows and result.sampled is not None:
            rows.append(("chance", {"full": result.full.chance().table(), "sampled": result.sampled.chance().table()}))
        name = f"{method} {settings.get('preset', '')}".strip()
        rows.append((f"{name} ({time.perf_counter() - began:.1f} s)", result.summary()))
    print_results("MovieLens-100K, strict pool, leave-one-out, seed 0 (percent)", rows)

    lists = models["mosaic"].recommend(USER, k=10).to_dicts()
    print_table(f"mosaic for user {USER}", ["rank", "title"], [[str(r["rank"]), r["title"]] for r in lists])
    reasons = models["mosaic"].explain(USER, lists[0]["item"]).head(3).to_dicts()
    print(f"{lists[0]['title']}, because of {', '.join(r['title'] for r in reasons)}")


if __name__ == "__main__":
    main()
