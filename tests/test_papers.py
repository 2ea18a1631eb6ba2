"""docs/papers.md names files, tests and cards that exist, and every card."""

from __future__ import annotations

import re
from pathlib import Path

from fedmosaic.reproduce.shelf import CARDS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "papers.md").read_text()


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`([a-z_]+/[\w/.]*)`", PAGE))
    assert len(named) > 25
    absent = [n for n in named if not ((ROOT / "fedmosaic" / n).exists() or (ROOT / n).exists())]
    assert absent == []


def test_every_card_is_named_and_every_name_is_a_card() -> None:
    named = set(re.findall(r"cards? `([a-z0-9-]+)`", PAGE))
    assert named - set(CARDS) == set()
    assert set(CARDS) - named == set(), "a card that no statement leads to"


def test_a_line_that_shows_nothing_says_why() -> None:
    statements = PAGE[: PAGE.index("### FedRecGEL:")] + PAGE[PAGE.index("## What we do otherwise") :]
    lines = [line for line in statements.splitlines() if line.startswith("|") and not set(line) <= set("|- ")]
    assert len(lines) > 45
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 3, line
        assert cells[0], line
        assert cells[1] or cells[2], line
