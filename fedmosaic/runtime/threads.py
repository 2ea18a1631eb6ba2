"""How many threads a process may use, told to both pools at once."""

from __future__ import annotations

import os


def use_threads(count: int) -> None:
    """Limit PyTorch and Numba; before the first parallel work of the process.

    The two share an OpenMP setting that the last to start decides. Different numbers would oversubscribe the machine,
    and threads that wait for each other in loops then cost ten times the work.
    """
    import numba
    import torch

    os.environ["NUMBA_NUM_THREADS"] = str(count)
    numba.config.reload_config()  # type: ignore[no-untyped-call]
    torch.set_num_threads(count)
