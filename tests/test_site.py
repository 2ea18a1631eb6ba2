"""The site builds strictly, links nowhere that is not there, and fetches nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the site needs the extra `docs`")
    pytest.importorskip("mkdocstrings", reason="the site needs the extra `docs`")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= 30
    for page in pages:
        fetched = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert fetched == [], page


def test_readme_and_other_pages_link_to_files_that_are_there() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / name).read_text()):
            assert (ROOT / target).exists(), f"{name}: {target}"
