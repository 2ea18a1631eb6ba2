"""FedRecGEL (WWW 2026): radius sweep, landscapes, ablation."""

from __future__ import annotations

from typing import Any

from fedmosaic.reproduce.card import Card, Claim, Reason
from fedmosaic.reproduce.draw_curves import draw_radii
from fedmosaic.reproduce.draw_land import draw_landscapes

PAPER = "Sharpness-aware minimization for generalized embedding learning, arXiv 2603.11503, WWW 2026"
OUT: dict[str, Any] = {"split": "last-out"}
RADII = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
# HR@10 and NDCG@10 along the shared radius and along the private one, from the plotting notebook
SWEEPS = {
    "filmtrust-5": (
        0.02,
        "91.58 91.61 91.77 91.52 91.52 91.61 91.52 88.92", "78.72 77.61 81.75 79.22 80.05 79.25 77.82 79.89",
        "91.61 91.77 91.77 91.61 91.77 91.52 91.77 91.93", "77.29 77.32 81.75 80.30 79.04 77.97 81.50 79.45",
    ),
    "lastfm-2k-tags": (
        0.01,
        "63.50 64.69 64.69 63.50 64.50 62.31 62.00 61.94", "43.26 44.56 43.98 43.69 43.73 43.11 42.21 42.30",
        "", "",
    ),
    "amazon-video": (
        0.01,
        "62.75 62.71 62.64 62.66 62.60 62.56 61.77 60.46", "41.24 41.26 40.99 41.22 41.25 41.38 40.92 40.66",
        "62.64 62.71 62.61 62.95 62.96 62.80 62.61 62.71", "41.14 41.26 41.40 41.40 41.40 41.44 41.30 41.15",
    ),
}  # fmt: skip
# Round, HR@10 and NDCG@10 by the paper's choice, the best test HR, seed 0, for shared and private radius S and P:
# python benchmarks/best_test_round.py fedrecgel filmtrust-5 split=last-out ties=hash rho_shared=S rho_private=P
# python benchmarks/best_test_round.py fedrecgel lastfm-2k-tags split=last-out straddle=true ties=file rho_shared=S ...
BY_TEST = {
    ("filmtrust-5", 0.0, 0.02): (64, 90.79, 80.28),
    ("filmtrust-5", 0.01, 0.02): (50, 90.79, 79.01),
    ("filmtrust-5", 0.05, 0.02): (48, 90.71, 79.22),
    ("filmtrust-5", 0.2, 0.02): (64, 90.71, 79.80),
    ("filmtrust-5", 0.02, 0.0): (51, 90.79, 79.10),
    ("filmtrust-5", 0.02, 0.01): (51, 90.79, 79.35),
    ("filmtrust-5", 0.02, 0.1): (52, 90.79, 79.83),
    ("filmtrust-5", 0.02, 0.2): (71, 90.71, 80.91),
    ("filmtrust-5", 0.02, 1.0): (67, 90.71, 80.40),
    ("lastfm-2k-tags", 0.0, 0.01): (100, 64.38, 44.66),
    ("lastfm-2k-tags", 0.2, 0.01): (100, 63.94, 44.45),
    ("lastfm-2k-tags", 1.0, 0.01): (61, 63.94, 44.12),
}
# FilmTrust has no times and its authors drew some at random, so the held-out item is a random one: ours by hash.
SETTINGS: dict[str, dict[str, Any]] = {
    "filmtrust-5": {**OUT, "ties": "hash"},
    "lastfm-2k-tags": {**OUT, "straddle": True},
    "amazon-video": OUT,
}


def _claim(row: str, data: str, shared: float, private: float, paper: tuple[float | None, float | None]) -> Claim:
    given = {"rho_shared": shared, "rho_private": private, **SETTINGS[data]}
    chosen = BY_TEST.get((data, float(shared), float(private)))
    return Claim(row, data, "fedrecgel", given, paper, quick=6, reason=None if chosen is None else _by_test(*chosen))


def _by_test(at: int, hr: float, ndcg: float) -> Reason:
    words = (
        "the paper takes the round with the best test HR (`benchmarks/best_test_round.py` does), which with seed 0 is "
        f"round {at} of 100"
    )
    return Reason(words, measured=(hr, ndcg))


def _numbers(text: str) -> list[float | None]:
    values: list[float | None] = [float(v) for v in text.split()]
    return values or [None] * len(RADII)


def _sweep() -> list[Claim]:
    found = []
    for data, (base, hr_shared, ndcg_shared, hr_private, ndcg_private) in SWEEPS.items():
        for kind, hrs, ndcgs in (("shared", hr_shared, ndcg_shared), ("private", hr_private, ndcg_private)):
            if not hrs:
                continue
            for radius, hr, ndcg in zip(RADII, _numbers(hrs), _numbers(ndcgs), strict=True):
                pair = (radius, base) if kind == "shared" else (base, radius)
                found.append(_claim(f"{kind} radius {radius:g} (other {base:g})", data, *pair, (hr, ndcg)))
    return found


def _ablation() -> list[Claim]:
    names = ("both radii 0 (the host)", "shared only", "private only", "both")
    return [
        _claim(name, data, shared, private, (None, None))
        for data, radius in (("filmtrust-5", 0.02), ("amazon-video", 0.01))
        for name, (shared, private) in zip(names, ((0, 0), (radius, 0), (0, radius), (radius, radius)), strict=True)
    ]


CARDS = (
    Card(
        "fedrecgel-radii",
        PAPER,
        "FedRecGEL, figure 2: effect of the two radii",
        tuple(_sweep()),
        "Numbers of the plotting notebook: best round on the test set, one run. Ours: the last of 100 rounds, no look "
        "at the test. Its training negatives leave out training items only, which is our strict pool. Lastfm: the "
        "values as stored, before the notebook adds 16 and 29 points; the other sweep was stored only with them. "
        "QB-article cannot be had here.",
        pools=("strict",),
        protocol=SETTINGS,
        draw=draw_radii,
    ),
    Card(
        "fedrecgel-landscape",
        PAPER,
        "FedRecGEL, figures 1 and 3: loss landscapes",
        (
            Claim("FedNCF (radii 0)", "filmtrust-5", "fedneumf", SETTINGS["filmtrust-5"], seeds=1, quick=6),
            Claim("FedRecGEL", "filmtrust-5", "fedrecgel", SETTINGS["filmtrust-5"], seeds=1, quick=6),
        ),
        "Same examples and one scale for both models, heights above the model's own loss; `fedmosaic landscape` "
        "prints the scalars. Zero-mean directions are the same for both; those scaled to the model's own rows differ "
        "with them.",
        "no number to compare. The paper draws FedRecGEL flatter. Here its loss rises by a third less near by "
        "(0.001 along the gradient), and less along random directions that are scaled to the rows; far uphill it is "
        "lower by one recipe and higher by another. The paper's own recipe shows the shuffling of batches more than "
        "the models: both surfaces have the same bumps.",
        pools=("strict",),
        protocol=SETTINGS,
        draw=draw_landscapes,
        states=True,
    ),
    Card(
        "fedrecgel-ablation",
        PAPER,
        "FedRecGEL: one side sharpness-aware, or both",
        tuple(_ablation()),
        "The paper's ablation table could not be read; its code's switches equal a radius of 0.",
        "cannot be checked. Here the four rows of a data set differ by less than seeds do.",
        pools=("strict",),
        protocol=SETTINGS,
    ),
)
