"""What every run of a study needs, imported once: the fork server imports this module, and all runs are its children.

Numba's tables are filled here, too; otherwise each run would take a second and a half for them. Nothing here starts a
thread: a child of a process with threads may hang.
"""

from importlib import import_module

from numba.core.registry import cpu_target

MODULES = (
    "polars", "scipy.linalg", "scipy.sparse", "fedmosaic.algorithm.compiled", "fedmosaic.data.compiled",
    "fedmosaic.engines.compiled", "fedmosaic.engines.fused.linear_loop", "fedmosaic.engines.fused.net_loop",
    "fedmosaic.engines.fused.pair_loop", "fedmosaic.engines.fused.pool_loop", "fedmosaic.evaluation.compiled",
    "fedmosaic.privacy.compiled", "fedmosaic.runs.study",
)  # fmt: skip

for name in MODULES:
    import_module(name)
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
