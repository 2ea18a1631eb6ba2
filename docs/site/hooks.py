"""What the site needs beyond its pages: the changelog as one of them, and docstrings with their examples as code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]


def on_files(files: Files, config: Any) -> Files:
    """Add the changelog, with its links as they are from inside the site."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=text))
    return files


class Examples(griffe.Extension):
    """Doctests are code, and paragraphs that are indented are formulas: both go into blocks of code."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Fence the examples of one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"((?:^>>>.*\n?)(?:^(?!\s*$).*\n?)*)", r"```python\n\1\n```\n", obj.docstring.value, flags=re.M
            )
