"""How many threads a process may use, told to both pools at once."""

from __future__ import annotations


def use_threads(count: int) -> None:
    """Limit Numba and PyTorch, in this order; before the first parallel work of the process.

    The two share an OpenMP setting that the last to start decides, so Numba's pool is started here (which is what
    setting its number does) and PyTorch's number set after it. Different numbers would oversubscribe the machine, and
    threads that wait for each other in loops then cost ten times the work.
    """
    import numba
    import torch

    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    torch.set_num_threads(count)
