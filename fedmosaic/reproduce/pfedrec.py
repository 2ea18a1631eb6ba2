"""PFedRec (IJCAI 2023): tables 1 to 4, figures 2 and 3."""

from __future__ import annotations

from typing import Any

from fedmosaic.privacy.noise import Draws
from fedmosaic.reproduce.card import SEEDS, Card, Claim, Reason
from fedmosaic.reproduce.counts import Count
from fedmosaic.reproduce.draw_rows import draw_inference, draw_tsne

PAPER = "Zhang et al., Dual personalization on federated recommendation, IJCAI 2023"
DATA = ("ml-100k", "ml-1m", "lastfm-2k-tags", "amazon-video")
ONCE = "lastfm-2k-tags-dedup"  # the tags without the repeats that straddle the split
SETTINGS: dict[str, dict[str, Any]] = {"lastfm-2k-tags": {"straddle": True}}  # repeats straddle the split, as there
# Where the rates chosen on ML-100K diverge
OTHER: dict[str, dict[str, dict[str, Any]]] = {
    "amazon-video": {
        "fedncf": {"network_rate": 0.3, "item_factor": 2.4, "user_rate": 10.0},
        "fedncf-dual": {"network_rate": 0.3, "item_factor": 2.4},
    },
    "lastfm-2k-tags": {
        "fedncf": {"network_rate": 0.3, "item_factor": 1.2, "user_rate": 20.0},
        "fedncf-dual": {"item_factor": 0.5, "rounds": 45},  # best between 21 and 35; one seed diverges in 59
    },
}
OTHER[ONCE] = {**OTHER["lastfm-2k-tags"], "fedncf-dual": {"item_factor": 0.25}}
# As many steps of MetaMF's server as 100 rounds have on ML-100K: a round has one for every 32 clients
STEPS = {"ml-1m": 16, "lastfm-2k-tags": 60, ONCE: 60, "amazon-video": 12}
TABLE1 = (
    Count("MovieLens-100K", "ml-100k", 100_000, 943, 1_682, 93.70),
    Count("MovieLens-1M", "ml-1m", 1_000_209, 6_040, 3_706, 95.53),
    Count("Lastfm-2K", "lastfm-2k-tags", 185_650, 1_600, 12_454, 99.07),
    Count("Amazon-Video", "amazon-video", 63_836, 8_072, 11_830, 99.93),
)
# HR@10, its deviation, NDCG@10, its deviation; one group per data set
TABLE2 = {
    "ncf": ("NCF, central", "64.14 .98 37.91 .37  64.17 .99 37.85 .68  82.44 .42 67.43 .89  60.16 .43 38.97 .14"),
    "mf": ("MF, central", "64.43 1.02 38.95 .56  68.45 .34 41.37 .18  82.71 .54 71.04 .62  46.69 .65 29.83 .45"),
    "fedmf": ("FedMF", "65.15 1.16 39.38 1.08  67.72 .14 40.90 .14  81.64 .48 69.36 .42  59.67 .19 38.55 .21"),
    "fedncf": ("FedNCF", "60.62 .59 33.25 1.35  60.54 .46 34.17 .40  81.55 .38 61.03 .63  57.77 .07 36.86 .06"),
    "fedrecon": ("FedRecon", "64.45 .81 37.78 .38  63.28 .15 36.59 .33  82.06 .38 67.58 .35  59.80 .14 38.87 .13"),
    "metamf": ("MetaMF", "66.38 .24 40.59 .31  45.61 .18 25.24 .35  80.88 .45 64.24 .45  57.51 .53 37.25 .28"),
    "fedpergnn": ("FedPerGNN", "10.50 .12 4.92 .21  9.69 .23 4.37 .31  10.19 .41 4.83 .25  10.72 .33 4.90 .32"),
    "pfedrec": ("PFedRec", "71.62 .83 43.44 .89  73.26 .20 44.36 .16  82.38 .92 73.19 .38  60.08 .08 39.12 .09"),
}
TABLE3 = {
    "fedncf-dual": (
        "FedNCF + dual",
        "68.82 1.35 39.33 .85  68.17 .55 39.56 .29  82.31 .56 71.64 .43  59.57 .57 38.73 .62",
    ),
    "fedrecon-dual": (
        "FedRecon + dual",
        "70.20 .90 41.83 .71  68.89 .26 40.04 .16  83.51 .23 74.83 .44  60.23 .16 39.20 .12",
    ),
}
NOISES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
TABLE4 = {
    "ml-100k": ((71.62, 71.45, 71.26, 71.13, 70.84, 70.88), (43.44, 43.36, 43.30, 43.22, 43.14, 43.21)),
    "ml-1m": ((73.26, 73.13, 73.19, 73.05, 73.18, 73.08), (44.36, 44.16, 44.25, 44.26, 44.23, 44.18)),
    "lastfm-2k-tags": ((82.38, 82.04, 81.91, 81.85, 81.98, 81.88), (73.19, 72.41, 72.23, 72.43, 72.39, 72.36)),
    "amazon-video": ((60.08, 59.31, 59.29, 59.21, 59.15, 59.06), (39.12, 37.97, 37.92, 37.83, 37.81, 37.34)),
}
# Central MF as PyTorch leaves it, vectors from N(0, 1) and batches of 256, which the paper prints; the rate it does not
PAPERS_MF: dict[str, Any] = {"init": 1.0, "batch_size": 256, "rate": 0.005}
NO_RATE = "the paper prints no rate"
NOT_RATES = "not the rates: at equal HR our NDCG is higher"
CARRIED = "rates carried over from ML-100K"
# Why a cell differs, each with the run that tests it (the paper's pool, seed 0)
REASONS = {
    ("ncf", "ml-100k"): Reason(NO_RATE, {"rate": 0.003}),
    ("mf", "ml-1m"): Reason(
        "from small vectors it is within the band (the row below); the paper prints no rate", {"rate": 0.001}
    ),
    ("mf", "amazon-video"): Reason(
        "with the paper's beginning and batch it is below popularity, as there; the rate is not printed", {"rate": 0.01}
    ),
    ("metamf", "ml-100k"): Reason(
        "not the rates, of which 20 were searched, nor the width", {"hidden": 256, "memory": 256}
    ),
    ("metamf", "lastfm-2k-tags"): Reason("the paper prints no settings; without weight decay", {"decay": 0.0}),
    ("metamf", "amazon-video"): Reason(
        "the paper's is below popularity, ours at its level; so it is without decay", {"decay": 0.0}
    ),
    ("fedncf", "lastfm-2k-tags"): Reason("HR still rises in the last round; with more rounds", {"rounds": 200}),
    ("fedncf", "amazon-video"): Reason(
        "the paper's is below popularity, ours at its level, with half the item rate too", {"item_factor": 1.2}
    ),
    ("fedncf-dual", "ml-100k"): Reason(NOT_RATES, {"item_factor": 0.5}),
    ("fedncf-dual", "ml-1m"): Reason(NO_RATE, {"item_factor": 0.5}),
    ("fedncf-dual", "lastfm-2k-tags"): Reason("not the rates: twice as high diverges, half", {"item_factor": 0.25}),
    ("fedrecon", "ml-1m"): Reason(CARRIED, {"item_factor": 2.0}),
    ("fedrecon", "lastfm-2k-tags"): Reason(CARRIED, {"item_factor": 1.0}),
    ("fedrecon", "amazon-video"): Reason(CARRIED, {"user_rate": 0.1, "item_factor": 4.0}),
    ("fedrecon-dual", "ml-100k"): Reason(NO_RATE, {"item_factor": 2.0}),
    ("fedrecon-dual", "ml-1m"): Reason(CARRIED, {"item_factor": 2.0}),
    ("fedrecon-dual", "lastfm-2k-tags"): Reason(CARRIED, {"item_factor": 1.0}),
    ("fedrecon-dual", "amazon-video"): Reason(CARRIED, {"user_rate": 0.1, "item_factor": 4.0}),
}
FAILED = Reason(
    "the published row is at chance, a failed run rather than a result; even without negatives, as on ratings",
    {"negatives": 0},
)
REASONS |= {("fedpergnn", data): FAILED for data in DATA}
NOT_THE_NOISE = Reason(
    "the row without noise is as far off, within its deviation; noise itself costs as little as there"
)
QUICK = {"ncf": 2, "mf": 3, "fedncf": 6, "fedncf-dual": 6, "metamf": 2, "fedpergnn": 1}


def _rows(table: dict[str, tuple[str, str]]) -> list[Claim]:
    found = []
    for method, (row, text) in table.items():
        values = [float(v) for v in text.split()]
        for at, data in enumerate(DATA):
            hr, hr_spread, ndcg, ndcg_spread = values[4 * at : 4 * at + 4]
            found.append(
                Claim(
                    row, data, method,
                    {**SETTINGS.get(data, {}), **_given(method, data)},
                    (hr, ndcg), (hr_spread, ndcg_spread), quick=QUICK.get(method, 20),
                    reason=REASONS.get((method, data)),
                )
            )  # fmt: skip
        found.append(Claim(row, ONCE, method, _given(method, ONCE), quick=0))
        if method == "mf":  # what it can do
            shared = [(data, SETTINGS.get(data, {})) for data in (*DATA, ONCE)]
            found += [Claim("MF, central, small vectors", data, "mf", given, quick=0) for data, given in shared]
    return found


def _given(method: str, data: str) -> dict[str, Any]:
    if method in OTHER.get(data, {}):
        return OTHER[data][method]
    if method == "mf":
        return PAPERS_MF
    rounds = {"fedpergnn": 20, "metamf": STEPS.get(data)}.get(method)
    return {} if rounds is None else {"rounds": rounds}


def _spread(data: str) -> tuple[float, float]:
    """PFedRec's deviations in table 2, which hold for the rows without noise too."""
    values = [float(v) for v in TABLE2["pfedrec"][1].split()]
    at = 4 * DATA.index(data)
    return values[at + 1], values[at + 3]


def _noises() -> list[Claim]:
    found = []
    for data, (hrs, ndcgs) in TABLE4.items():
        for noise, hr, ndcg in zip(NOISES, hrs, ndcgs, strict=True):
            found.append(
                Claim(
                    f"noise {noise}", data, "pfedrec", _with_noise(data, noise), (hr, ndcg),
                    _spread(data) if noise == 0 else (0.0, 0.0), quick=8 * (noise in (0.0, 0.5)),
                    reason=NOT_THE_NOISE if noise and data == "ml-100k" else None,
                )
            )  # fmt: skip
    # no published numbers there: both ends show the shape
    found += [Claim(f"noise {noise}", ONCE, "pfedrec", _with_noise(ONCE, noise), quick=0) for noise in (0.0, 0.5)]
    for data in (*DATA, ONCE):
        given = _with_noise(data, 0.5, "each")
        found.append(Claim("noise 0.5, each draws its own", data, "pfedrec", given, seeds=SEEDS, quick=0))
    return found


def _with_noise(data: str, noise: float, draws: Draws = "summed") -> dict[str, Any]:
    return {**SETTINGS.get(data, {}), **({"noise": noise, "noise_draws": draws} if noise else {})}


CARDS = (
    Card(
        "pfedrec-table1",
        PAPER,
        "PFedRec, table 1: data sets",
        (),
        "Lastfm-2K is a list of tags: a user who gives an artist three tags stands there three times. Repeated pairs "
        "fall on both sides of the split, which is why the other tables have that set a second time, each pair once.",
        counts=TABLE1,
    ),
    Card(
        "pfedrec-table2",
        PAPER,
        "PFedRec, table 2: performance on four data sets",
        tuple(_rows(TABLE2)),
        "Everything in PFedRec's own protocol: leave-one-out, 1 + 99 candidates, ties in time by the order of the "
        "file, best validation round of 100 (30 epochs of the central methods, 45 or 60 rounds of FedNCF + dual, 20 of "
        "FedPerGNN, and of MetaMF as many as make 3,000 steps of the server). Rates of NCF, MF, FedNCF, FedRecon and "
        "MetaMF are not printed in the paper; ours were chosen on ML-100K (`docs/methods.md`) and carried to the "
        "others, but for FedNCF on Lastfm-2K and Amazon-Video, where they diverge: lower ones. MF begins at N(0, 1), "
        "PyTorch's default, with the paper's batch of 256: that, not overfitting, is why the published MF is so low on "
        "Amazon-Video; from N(0, 0.01) it is 17 points better there. FedPerGNN's published row is at chance.",
        protocol=SETTINGS,
        core=True,
    ),
    Card(
        "pfedrec-table3",
        PAPER,
        "PFedRec, table 3: dual personalisation on three hosts",
        tuple(c for c in _rows(TABLE2) if c.method in ("fedmf", "fedncf", "fedrecon", "pfedrec"))
        + tuple(_rows(TABLE3)),
        "PFedRec is FedMF with dual personalisation. Under the paper's pool the wrapper lifts every host on MovieLens "
        "and on the tags of Lastfm-2K, none on Amazon-Video, and not every one where each pair counts once. Under the "
        "strict pool, where tuned rows cannot know which items were spared, HR among 1 + 99 falls on MovieLens by one "
        "to seven points, and the ranking of everything moves by less than seeds do; tuned rows still help only where "
        "repeated tags straddle the split, another leak.",
        protocol=SETTINGS,
        core=True,
    ),
    Card(
        "pfedrec-table4",
        PAPER,
        "PFedRec, table 4: Laplace noise on what is sent",
        tuple(_noises()),
        "Noise is added to every number sent, nothing is clipped, so no epsilon follows. The sum of the clients' noise "
        "is drawn at once, by its law (`noise_draws=summed`); where every client draws its own, the last row of each "
        "data set, the same comes out. The paper reports a decline from 71.62 to 70.88 on ML-100K: it is not "
        "reproduced, our curve is flat, and all numbers match because the whole effect is smaller than the band.",
        protocol=SETTINGS,
    ),
    Card(
        "pfedrec-figure2",
        PAPER,
        "PFedRec, figure 2: item rows of one user, by t-SNE",
        tuple(
            Claim(row, "ml-100k", method, seeds=1, quick=QUICK.get(method, 20))
            for method, (row, _) in TABLE2.items()
            if method in ("metamf", "fedmf", "fedrecon", "pfedrec")  # the best three there, and PFedRec
        ),
        "Blue: items of the user's history. The paper sees two clusters under PFedRec only.",
        "no number to compare. The user's items lie together under PFedRec and not under the others, as in the paper. "
        "They are the rows that were trained as positives, on this device: a picture of the training set, not of "
        "taste.",
        draw=draw_tsne,
        states=True,
    ),
    Card(
        "pfedrec-figure3",
        PAPER,
        "PFedRec, figure 3: answering with own, global, or somebody else's rows",
        (Claim("PFedRec", "ml-100k", "pfedrec", seeds=1, quick=20),),
        "The paper prints bars without numbers: own best, global next, random worst.",
        "the order is the paper's under its pool. Under the strict pool the global rows answer best.",
        draw=draw_inference,
        states=True,
    ),
)  # fmt: skip
