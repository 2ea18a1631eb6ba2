"""Tables of data sets: what a paper counts, and what is counted here in the same data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedmosaic.core.errors import FetchError
from fedmosaic.data import sources
from fedmosaic.report.tables import Table

HEADER = ("data", "paper: rows, users, items, sparsity", "here", "distinct pairs", "verdict")


@dataclass(frozen=True)
class Count:
    """A data set as a paper describes it.

    >>> print(Count("MovieLens-100K", "ml-100k", 100_000, 943, 1_682, 93.70).text())
    100,000, 943, 1,682, 93.70 %
    """

    name: str
    data: str
    rows: int
    users: int
    items: int
    sparsity: float  # percent

    def text(self) -> str:
        """As a table cell."""
        return f"{self.rows:,}, {self.users:,}, {self.items:,}, {self.sparsity:.2f} %"


def counts_table(title: str, counts: Sequence[Count], data_dir: Path | None) -> Table:
    """One row per data set; nothing is fetched."""
    return Table(title, HEADER, tuple(_row(count, data_dir) for count in counts))


def _row(count: Count, data_dir: Path | None) -> tuple[str, ...]:
    try:
        found = sources.load(count.data, data_dir, download=False).describe()
    except FetchError:
        return count.name, count.text(), "not here", "", "cannot be checked"
    rows, users, items = (found[part] for part in ("interactions", "users", "items"))
    sparsity = round(100 * (1 - rows / (users * items)), 2)  # as papers do: repeated pairs count again
    ours = Count(count.name, count.data, rows, users, items, sparsity)
    verdict = "matches" if ours == count else "differs"
    return count.name, count.text(), ours.text(), f"{found['distinct pairs']:,}", verdict
