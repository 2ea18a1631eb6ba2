"""One run shared by several processes: the first keeps the folder, evaluates and reports; the others work along.

On one machine the helpers are started here and meet through a file. On several, the same command is started on each
with its --rank and a --rendezvous address.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedmosaic.core.errors import SettingsError
from fedmosaic.core.extras import require_torch
from fedmosaic.core.threads import VARIABLE, use_threads
from fedmosaic.engines.engine import Team
from fedmosaic.engines.federation import Federation
from fedmosaic.runs.run import Setup, start
from fedmosaic.runs.settings import Settings
from fedmosaic.runs.study import Where
from fedmosaic.training.loop import OnRound, steps


def run_together(
    settings: Settings,
    place: Path,
    workers: int,
    *,
    rank: int = 0,
    rendezvous: str | None = None,
    trusted: bool = False,
    data_dir: Where = None,
    on_round: OnRound | None = None,
) -> dict[str, Any] | None:
    """The summary of the run, on the first rank; the others return nothing."""
    require_torch("sharing a run between processes")
    from fedmosaic.engines.distributed import joined

    method = settings.build()
    if not isinstance(method, Federation) or method.pooled:
        raise SettingsError(f"{settings.method} runs in one process; drop --workers")
    if not 0 <= rank < workers:
        raise SettingsError(f"rank {rank} is not one of {workers} workers (0 to {workers - 1})")
    if settings.patience is not None:
        raise SettingsError("patience stops one process; several run all rounds: drop it, or drop --workers")
    if rank and rendezvous is None:
        raise SettingsError("a rank other than 0 needs the --rendezvous of the others")
    with tempfile.TemporaryDirectory() as folder:
        use_threads(max(1, (os.cpu_count() or 1) // (workers if rendezvous is None else 1)))
        address = rendezvous or f"file://{folder}/meet"
        helpers = _helpers(settings, workers, Path(folder), address, data_dir) if rendezvous is None else nullcontext()
        with helpers, joined(rank, workers, address, trusted=trusted) as team:
            if rank:
                _assist(settings, method, team, data_dir)
                return None
            return start(settings, place, data_dir=data_dir, on_round=on_round, team=team)


def _assist(settings: Settings, method: Federation, team: Team, data_dir: Where) -> None:
    """Work along: the same rounds on the same data, without looking at what comes out."""
    setup = Setup.of(settings, settings.split_data(settings.load_data(data_dir)))
    for _ in steps(replace(method, team=team), setup.data, settings.seed, query=setup.validation.query):
        pass


@contextmanager
def _helpers(settings: Settings, workers: int, folder: Path, address: str, data_dir: Where) -> Iterator[None]:
    """The other ranks on this machine, gone when the run is over, however it ends."""
    config = folder / "config.toml"
    config.write_text(settings.to_toml())
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, VARIABLE: threads}
    words = [sys.executable, "-m", "fedmosaic", "run", "--config", str(config), "--workers", str(workers)]
    words += ["--rendezvous", address, "--quiet", *(["--data-dir", str(data_dir)] if data_dir else [])]
    processes = [subprocess.Popen([*words, "--rank", str(n)], env=environment) for n in range(1, workers)]
    try:
        yield
        for process in processes:
            process.wait(timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.wait()
