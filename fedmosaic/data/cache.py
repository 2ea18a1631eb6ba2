"""Where fetched data is kept."""

from __future__ import annotations

import os
from pathlib import Path

FORMAT = "v1"  # part of every cache path: another version's files are never read


def cache_folder() -> Path:
    """Where fetched data is kept; `FEDMOSAIC_CACHE` moves it."""
    import platformdirs

    named = os.environ.get("FEDMOSAIC_CACHE")
    return (Path(named) if named else Path(platformdirs.user_cache_dir("fedmosaic", appauthor=False))) / "data" / FORMAT
