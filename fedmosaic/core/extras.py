"""Parts that are installed when they are needed: which extra brings them, said in one line."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from fedmosaic.core.errors import RequestError


class MissingExtraError(RequestError):
    """Something that was asked for needs an extra that is not installed."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed; pip install 'fedmosaic[{extra}]' brings it")


def require_extra(what: str, module: str, package: str, extra: str) -> None:
    """Refuse `what` unless a module can be imported; nothing is imported here."""
    if find_spec(module) is None:
        raise MissingExtraError(what, package, extra)


def require_torch(what: str) -> None:
    """Refuse `what` unless PyTorch is installed."""
    require_extra(what, "torch", "PyTorch", "torch")


class Lazy:
    """A module that is imported when one of its names is first used; without it, the error says what to install."""

    def __init__(self, module: str, package: str, extra: str, what: str) -> None:
        self._said = (what, module, package, extra)

    def __getattr__(self, name: str) -> Any:
        require_extra(*self._said)
        return getattr(import_module(self._said[1]), name)


def lazy_torch(what: str) -> Any:
    """PyTorch, imported at its first use; `what` needs it."""
    return Lazy("torch", "PyTorch", "torch", what)
