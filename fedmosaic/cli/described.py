"""What `fedmosaic describe` says of a method."""

from __future__ import annotations

from typing import Any

from fedmosaic.algorithm.algorithm import Algorithm, describe
from fedmosaic.engines.choice import explain
from fedmosaic.methods.base import Entry
from fedmosaic.methods.registry import entry

SEEN = ("settings", "a curious server", "other devices", "the network")
ITEMS = 1682  # of the catalogue that sizes are told for: MovieLens-100K


def described_method(name: str) -> dict[str, Any]:
    """Paper, settings, parameters and who holds them, engines with their reasons, bytes, numbers to expect."""
    found = entry(name)
    settings = [
        {"setting": setting, "default": _default(field.default), "meaning": field.description or ""}
        for setting, field in found.settings.model_fields.items()
    ]
    method = found.build()
    algorithm, central = getattr(method, "algorithm", None), bool(getattr(method, "pooled", False))
    parameters, engines = [], {}
    if isinstance(algorithm, Algorithm):
        parameters = describe(algorithm, ITEMS)
        if "engine" in found.settings.model_fields:
            engines = explain(algorithm, "everybody" if central else "user")
    up, down = method.traffic(ITEMS)
    return {
        "method": name,
        "title": found.title,
        "paper": found.paper,
        "about": (found.settings.__doc__ or "").strip(),
        "settings": settings,
        "expect": dict(found.expect),
        "central": central,
        "parameters": parameters,
        "engines": engines,
        "bytes": {"items": ITEMS, "up": up, "down": down},
        "privacy": seen_by(found, central),
    }


def seen_by(found: Entry, central: bool) -> list[dict[str, str]]:
    """Who sees what of a user, without protection and with those that the method has."""
    if central:
        return [dict(zip(SEEN, ("always", "everything", "nothing", "nothing: it is on one server"), strict=True))]
    has, method = found.settings.model_fields, found.build()
    form = not isinstance(getattr(method, "algorithm", None), Algorithm)
    common = "the model" if form else "the shared parameters"
    sent = "statistics of the history, which tell it" if form else "an upload, which tells the history"
    rows = [("nothing set", sent, common, "TLS; sizes alike, if uploads are dense")]
    if "noise" in has:
        rows.append(("noise=", f"{sent}, hardly less: no epsilon follows", common, "the same"))
    if "secure" in has:
        masked = "the sum of a round, and who took part"
        rows.append(("secure=true", masked, common, "the same; all messages of a round have one length"))
    if "groups" in has:
        grouped = "the sum of every group of clients, and who took part"
        rows.append(("secure=true groups=N reduce=median", grouped, common, "the same as with secure=true"))
    if "epsilon" in has:
        rows.append(("epsilon=", f"{sent}, bounded (it adds the noise)", f"{common}, with an epsilon", "the same"))
    if "trust" in has:
        rows.append(
            (
                "epsilon= trust=devices secure=true",
                "a sum with its noise, and who took part",
                f"{common}, with an epsilon",
                "the same as with secure=true",
            )
        )
    return [dict(zip(SEEN, row, strict=True)) for row in rows]


def _default(value: Any) -> Any:
    return "none" if value is None else value
