"""FedRecGEL (WWW 2026): radius sweep, landscapes, ablation."""

from __future__ import annotations

from typing import Any

from fedmosaic.reproduce.card import Card, Claim, Reason
from fedmosaic.reproduce.draw_curves import draw_radii
from fedmosaic.reproduce.draw_land import draw_landscapes
from fedmosaic.reproduce.fedrap import SETTINGS as FEDRAP

PAPER = "Sharpness-aware minimization for generalized embedding learning, arXiv 2603.11503, WWW 2026"
OUT: dict[str, Any] = {"split": "last-out"}
FILMS = "filmtrust-5-drawn"
RADIUS = {FILMS: 0.02, "lastfm-2k-tags": 0.01, "amazon-video": 0.01}  # where the sweeps of a data set meet
RADII = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
# HR@10 and NDCG@10 along the shared radius and along the private one, from the plotting notebook
SWEEPS = {
    FILMS: (
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
# FilmTrust has no times: its authors drew some at random, and so does this data set. Of tags that repeat, the release
# trains on one, and leaves it in where it is held out.
SETTINGS: dict[str, dict[str, Any]] = {
    FILMS: OUT,
    "lastfm-2k-tags": {**OUT, "straddle": "once"},
    "amazon-video": OUT,
}
BUDGET: dict[str, Any] = {"participation": 0.1}  # 100 rounds of a tenth of the clients, for every row
SMALLER: dict[str, Any] = {"network_rate": 0.3, "item_factor": 2.4, "user_rate": 10.0}  # FedNCF's else diverge
SLOWER: dict[str, dict[str, Any]] = {"lastfm-2k-tags": {"item_factor": 1.0}}  # FedRecon's, as in PFedRec's table 2


LAST_ROUND = Reason(
    "the paper takes the round with the best test HR; ours is the last of 100, without a look at the test"
)


def _claim(row: str, data: str, shared: float, private: float, paper: tuple[float | None, float | None]) -> Claim:
    given = {"rho_shared": shared, "rho_private": private, **SETTINGS[data]}
    return Claim(row, data, "fedrecgel", given, paper, quick=6, reason=LAST_ROUND)


def _main() -> list[Claim]:
    found = []
    for data, radius in RADIUS.items():
        shared = {**SETTINGS[data], **BUDGET}
        rap = FEDRAP["amazon-video-10"] if data == "amazon-video" else {}
        for row, method, given in (
            ("FedMF", "fedmf", {}),
            ("FedNCF", "fedncf", SMALLER),
            ("FedRecon", "fedrecon", SLOWER.get(data, {})),
            ("PFedRec", "pfedrec", {}),
            ("FedRAP", "fedrap", {"ramp": "as-released", **rap}),
            ("FedNeuMF, the host", "fedneumf", {}),
            ("FedRecGEL", "fedrecgel", {"rho_shared": radius, "rho_private": radius}),
        ):
            found.append(Claim(row, data, method, {**shared, **given}, quick=6))
    return found


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
        for data, radius in RADIUS.items()
        for name, (shared, private) in zip(names, ((0, 0), (radius, 0), (0, radius), (radius, radius)), strict=True)
    ]


CARDS = (
    Card(
        "fedrecgel-main",
        PAPER,
        "FedRecGEL: against the others on its data sets",
        tuple(_main()),
        "100 rounds of a tenth of the clients for every row, the last round, no look at the test; other rates as on "
        "ML-100K, FedNCF's lower, and FedRecon's on Lastfm, where it diverged. The paper's table of results could not "
        "be read, so no number is compared.",
        "cannot be checked: the paper's main table is not in the text that could be had.",
        pools=("strict",),
        protocol=SETTINGS,
    ),
    Card(
        "fedrecgel-radii",
        PAPER,
        "FedRecGEL, figure 2: effect of the two radii",
        tuple(_sweep()),
        "Numbers of the plotting notebook: best round on the test set, one run. Ours: the last of 100 rounds, no look "
        "at the test. Its training negatives leave out training items only, which is our strict pool. Lastfm: the "
        "values as stored, before the notebook adds 16 and 29 points; the other sweep was stored only with them. "
        "QB-article cannot be had here. Popularity alone comes within the band of most of these numbers, and the whole "
        "effect of the radii is smaller than it.",
        source="plotting notebook of the release; on Lastfm-2K it plots 16 and 29 points more than it stores",
        pools=("strict",),
        protocol=SETTINGS,
        draw=draw_radii,
    ),
    Card(
        "fedrecgel-landscape",
        PAPER,
        "FedRecGEL, figures 1 and 3: loss landscapes",
        tuple(
            Claim(row, data, method, {**SETTINGS[data], **given}, seeds=1, quick=6)
            for data, radius in RADIUS.items()
            for row, method, given in (
                ("FedNCF (radii 0)", "fedneumf", {}),
                ("FedRecGEL", "fedrecgel", {"rho_shared": radius, "rho_private": radius}),
            )
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
