"""The compiler: Numba, with its cache in the user's cache folder, one for every version of what compiled code is given.

Numba finds cached code by the types of its arguments, and refuses to start where a named tuple of an older version has
gone. So the folder's name holds a digest of the modules that define them. `NUMBA_CACHE_DIR` moves the cache.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import platformdirs

F = TypeVar("F", bound=Callable[..., Any])
ARGUMENTS = ("skeleton.py", "pair.py", "net.py", "pool.py")  # in engines/fused: they define the named tuples


def cache_folder() -> Path:
    """Where compiled code is kept."""
    fused = Path(__file__).parents[1] / "engines" / "fused"
    digest = hashlib.sha256(b"".join((fused / name).read_bytes() for name in ARGUMENTS)).hexdigest()[:12]
    root = Path(platformdirs.user_cache_dir("fedmosaic", appauthor=False))
    return root / "compiled" / f"{digest}-numba-{numba.__version__}"


if not os.environ.get("NUMBA_CACHE_DIR"):
    numba.config.CACHE_DIR = str(cache_folder())  # type: ignore[attr-defined]


def entry(**options: Any) -> Callable[[F], F]:
    """Compile a function that Python calls: kept in the cache, and run without the interpreter's lock."""
    found: Callable[[F], F] = numba.njit(
        **{"cache": True, "nogil": True, "fastmath": False, "error_model": "numpy", **options}
    )
    return found


def piece(**options: Any) -> Callable[[F], F]:
    """Compile a function that only compiled code calls.

    It is not cached by itself: what comes out of the cache cannot be inlined. Divisions are NumPy's, because a check
    for zero in every one keeps loops from being vectorised. And it says what arithmetic it has: else Numba would take
    over that of the caller which happens to be compiled first, and bits would depend on the order.
    """
    found: Callable[[F], F] = numba.njit(**{"fastmath": False, "error_model": "numpy", **options})
    return found
