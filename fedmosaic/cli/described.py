"""What `fedmosaic describe` says of a method."""

from __future__ import annotations

from typing import Any

from fedmosaic.algorithm.algorithm import Algorithm, describe
from fedmosaic.engines.choice import explain
from fedmosaic.methods.registry import entry

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
    }


def _default(value: Any) -> Any:
    return "none" if value is None else value
