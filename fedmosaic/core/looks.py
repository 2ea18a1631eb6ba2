"""How values look to people: a card of one screen in a terminal, a small table in a notebook, a bar while one waits."""

from __future__ import annotations

import html
import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

TALL = 24  # lines of a terminal that a card may fill


@dataclass(frozen=True)
class Glance:
    """A title, facts (name and value), and perhaps a table with a head.

    >>> print(Glance("shop", (("users", "3"), ("items", "20"))))
    shop
      users  3
      items  20
    """

    title: str
    facts: Sequence[tuple[str, str]] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = field(default=())

    def __str__(self) -> str:
        wide = max((len(name) for name, _ in self.facts), default=0)
        lines = [self.title, *(f"  {name.ljust(wide)}  {value}" for name, value in self.facts)]
        if self.head:
            every = [self.head, *self.rows]
            widths = [max(len(row[at]) for row in every) for at in range(len(self.head))]
            for row in every:
                first, *rest = (f"{c:{'<' if at == 0 else '>'}{widths[at]}}" for at, c in enumerate(row))
                lines.append("  " + "  ".join([first, *rest]).rstrip())
        return "\n".join(lines[:TALL] + (["  ..."] if len(lines) > TALL else []))

    @property
    def html(self) -> str:
        """The same as HTML that stands on its own."""
        left, right = ' style="text-align:left"', ' style="text-align:right"'
        told = [(html.escape(name), html.escape(value)) for name, value in self.facts]
        facts = "".join(f"<tr><th{left}>{name}</th><td{left}>{value}</td></tr>" for name, value in told)
        parts = [f"<strong>{html.escape(self.title)}</strong>", f"<table>{facts}</table>" if facts else ""]
        if self.head:
            sides = [left] + [right] * (len(self.head) - 1)
            head = "".join(f"<th{s}>{html.escape(c)}</th>" for s, c in zip(sides, self.head, strict=True))
            body = "".join(
                "<tr>" + "".join(f"<td{s}>{html.escape(c)}</td>" for s, c in zip(sides, row, strict=True)) + "</tr>"
                for row in self.rows
            )
            parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
        return "<div>" + "".join(parts) + "</div>"


class Shown:
    """A value that shows itself as a card."""

    @abstractmethod
    def glance(self) -> Glance:
        """What a person wants to know of it at a glance."""

    def __repr__(self) -> str:
        return str(self.glance())

    def _repr_html_(self) -> str:
        return self.glance().html


def notebook_bar(title: str) -> Callable[[int, int, dict[str, Any]], None] | None:
    """A bar for whoever waits in a notebook; none elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or "IPKernelApp" not in getattr(shell, "config", {}):
        return None
    seen: Any = import_module("IPython.display")
    handle = seen.display(seen.HTML(_bar(title, 0, 1)), display_id=True)

    def update(done: int, total: int, line: dict[str, Any]) -> None:
        if done % max(1, total // 100) == 0 or done == total:
            handle.update(seen.HTML(_bar(title, done, total)))

    return update


def _bar(title: str, done: int, total: int) -> str:
    return f'{html.escape(title)} <progress value="{done}" max="{total}"></progress> {done}/{total}'
