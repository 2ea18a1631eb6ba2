"""The registry: every method by name. A method's file is imported when the method is named, and not before.

Others add methods without editing this package: `register` in Python, an entry point of an installed package in the
group `fedmosaic.methods`, or a file named on the command line (`--import FILE`).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from fedmosaic.core import plugins
from fedmosaic.core.errors import SettingsError, UnknownNameError
from fedmosaic.methods.base import Entry

GROUP = "fedmosaic.methods"
HINT = "A method of your own needs --import FILE"
BUILT_IN = {  # method -> its file in this room
    "mosaic": "mosaic.method",
    "popularity": "popularity", "itemknn": "itemknn", "ease": "ease", "ials": "ials", "fcf": "fcf",
    "fedmf": "fedmf", "pfedrec": "pfedrec", "local-only": "local_only",
    "fedncf": "fedncf", "fedncf-rows": "fedncf", "fedncf-dual": "fedncf",
    "fedrecon": "fedrecon", "fedrecon-dual": "fedrecon",
    "fedrap": "fedrap", "fedrap-c": "fedrap", "fedrap-d": "fedrap", "fedrap-no": "fedrap", "fedrap-l2": "fedrap",
    "fedrap-fixed": "fedrap", "fedrap-sin": "fedrap", "fedrap-square": "fedrap", "fedrap-frac": "fedrap",
    "fedneumf": "fedrecgel", "fedrecgel": "fedrecgel",
    "fedmf-plgc": "plgc", "pfedrec-plgc": "plgc", "fedncf-plgc": "plgc", "fedrap-plgc": "plgc",
    "plgc": "plgc",
    "colr": "colr", "metamf": "metamf", "fedpergnn": "fedpergnn", "gpfedrec": "gpfedrec",
    "mf": "central", "ncf": "central", "neumf": "central",
    "sasrec": "sasrec", "lightgcn": "lightgcn", "fedlightgcn": "lightgcn", "fedcia": "fedcia", "feddae": "feddae",
}  # fmt: skip
_registered: dict[str, Entry] = {}


def names() -> list[str]:
    """Every method that can be named."""
    plugins.load()
    return [*BUILT_IN, *(n for n in _registered if n not in BUILT_IN), *sorted(plugins.points(GROUP))]


def entry(name: str) -> Entry:
    """A method by its name.

    >>> entry("ease").build({"lam": 200}).lam
    200.0
    """
    if name in BUILT_IN and name not in _registered:
        module = import_module(f"fedmosaic.methods.{BUILT_IN[name]}")
        _registered.update({e.name: e for e in module.METHODS})
    if name not in _registered:
        plugins.load()
    if name not in _registered and name in (found := plugins.points(GROUP)):
        loaded = plugins.loaded(found[name], Entry)
        register(loaded)
    if name not in _registered:
        raise UnknownNameError("method", name, names(), HINT)
    return _registered[name]


def check_name(name: str) -> None:
    """Refuse a name that no method has, without importing any."""
    if name not in BUILT_IN and name not in (known := names()):
        raise UnknownNameError("method", name, known, HINT)


def entries() -> Iterator[Entry]:
    """Every method, in the order of `names`."""
    return (entry(name) for name in names())


def register(new: Entry) -> None:
    """Add a method of one's own, so that recommenders, runs and comparisons of this process know it by name."""
    if new.name in BUILT_IN or new.name in _registered:
        raise SettingsError(f"there is a method {new.name!r} already; choose another name")
    _registered[new.name] = new
