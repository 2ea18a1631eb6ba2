"""Tables as values: text for a terminal, Markdown, CSV or LaTeX for a file, from the same rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from fedmosaic.audit.audit import Audit
from fedmosaic.core.errors import UnknownNameError
from fedmosaic.report.console import print_table
from fedmosaic.runs.comparison import COLUMNS, Comparison, Row, key_of

HEADLINE = key_of("full", "hr")
FORMATS = ("text", "markdown", "csv", "latex")
_ESCAPES = {"\\": r"\textbackslash{}", "±": r"$\pm$", "→": r"$\to$"}
_ESCAPES |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_ESCAPES |= {c: f"\\{c}" for c in "&%$#_{}"}


@dataclass(frozen=True)
class Table:
    """A title, a header, cells of text, and notes that belong beside every number."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def render(self, form: str) -> str:
        """Markdown, CSV or LaTeX."""
        if form == "markdown":
            return self.markdown()
        if form == "csv":
            return self.csv()
        if form == "latex":
            return self.latex()
        if form == "text":
            return self.text()
        raise UnknownNameError("table format", form, FORMATS)

    def show(self) -> None:
        """Print it on the terminal."""
        print_table(self.title, list(self.header), [list(r) for r in self.rows])
        for note in self.notes:
            print(note)

    def text(self) -> str:
        """Columns side by side, as wide as their cells.

        >>> print(Table("t", ("method", "HR@10"), (("a", "1.00"),)).text())
        t
        method  HR@10
        a        1.00
        """
        rows = [self.header, *self.rows]
        widths = [max(len(row[at]) for row in rows) for at in range(len(self.header))]
        cells = [
            [cell.ljust(w) if at == 0 else cell.rjust(w) for at, (cell, w) in enumerate(zip(row, widths, strict=True))]
            for row in rows
        ]
        return "\n".join([self.title, *("  ".join(row).rstrip() for row in cells), *self.notes])

    def markdown(self) -> str:
        """A pipe table, numbers to the right.

        >>> print(Table("t", ("method", "HR@10"), (("a|b", "1.00"),)).markdown())
        | method | HR@10 |
        |---|--:|
        | a\\|b | 1.00 |
        """
        marks = ["---"] + ["--:"] * (len(self.header) - 1)
        lines = [_pipe(self.header), "|" + "|".join(marks) + "|", *(_pipe(row) for row in self.rows)]
        return "\n".join([*lines, *([""] if self.notes else []), *self.notes])

    def csv(self) -> str:
        """Header and rows; notes are left out."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerows([self.header, *self.rows])
        return out.getvalue().rstrip("\n")

    def latex(self) -> str:
        """The table in LaTeX, for booktabs."""
        head = " & ".join(map(_escaped, self.header))
        body = [" & ".join(map(_escaped, row)) + r" \\" for row in self.rows]
        shape = "l" + "r" * (len(self.header) - 1)
        return "\n".join(
            [
                rf"% {self.title}",
                *(rf"% {note}" for note in self.notes),
                rf"\begin{{tabular}}{{{shape}}}",
                r"\toprule",
                head + r" \\",
                r"\midrule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
            ]
        )


def _pipe(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


def _escaped(text: str) -> str:
    return "".join(_ESCAPES.get(c, c) for c in text)


def comparison_table(found: Comparison) -> Table:
    """Means over seeds with their deviation, the interval of the headline, the paired test, and costs."""
    drawn = f"1+{found.candidates}"
    columns = [f"{'full' if p == 'full' else drawn} {m.upper()}@10" for p, m in COLUMNS]
    header = ("method", "pool", "seeds", *columns, "full HR@10 95 %", f"vs {found.baseline}", "p")
    header += ("seconds", "MB", "KB up", "KB down")
    rows = tuple((r.name, r.pool, str(len(r.seeds) or ""), *_values(r), *_test(r), *_costs(r)) for r in found.rows)
    notes = (
        f"{found.protocol}; percent; mean ± deviation over seeds",
        f"interval: bootstrap over users; vs {found.baseline}: full HR@10 of the same users (mean over seeds), sign "
        "flips, p by Holm over the rows of a pool; both are about users, not seeds; --json has the other columns'",
        "seconds and peak memory: the least of the seeds; kilobytes per client and round",
        *(f"missing: {title}" for title in found.missing),
    )
    return Table(f"comparison on {found.dataset}", header, rows, notes)


def _values(row: Row) -> list[str]:
    keys = [key_of(p, m) for p, m in COLUMNS]
    spreads = [row.deviation[k] for k in keys]
    cells = [
        f"{100 * row.mean[k]:.2f}" + ("" if d is None else f" ± {100 * d:.2f}")
        for k, d in zip(keys, spreads, strict=True)
    ]
    interval = row.interval[HEADLINE]
    return [*cells, f"{100 * interval.low:.2f} to {100 * interval.high:.2f}"]


def _test(row: Row) -> list[str]:
    test = row.paired.get(HEADLINE)
    return ["", ""] if test is None else [f"{100 * test.difference:+.2f}", f"{row.holm[HEADLINE]:.4f}"]


def _costs(row: Row) -> list[str]:
    if not row.cost:
        return ["", "", "", ""]
    kilobytes = (f"{row.cost[k] / 1000:,.1f}" for k in ("bytes_up", "bytes_down"))
    return [f"{row.cost['seconds']:.1f}", f"{row.cost['peak_mb']:.0f}", *kilobytes]


def audit_tables(title: str, found: Audit) -> list[Table]:
    """What a server guessed, beside what popularity guesses; what messages and noise tell; what liars reached."""
    rows = [("popularity, nothing seen", "", f"{found.prior.f1:.3f}", f"{found.prior.auc:.3f}")]
    rows += [(f.attack, str(f.round), f"{f.f1:.3f}", f"{f.auc:.3f}") for f in found.inference]
    tables = [Table(f"{title}: a curious server guesses histories", ("attack", "round", "F1", "AUC"), tuple(rows))]
    told = [
        (
            f"messages of round {m.round}",
            "one size"
            if m.sizes == 1
            else f"{m.sizes} sizes, correlation with lengths of histories {m.correlation:.2f}",
        )
        for m in found.messages
    ]
    if found.noise is not None:
        told.append(("noise", f"{found.noise.recovered} of {found.noise.devices} keys recovered from one upload"))
    if told:
        tables.append(Table(f"{title}: what else tells", ("what", "found"), tuple(told)))
    harm = [(d.attack, f"{d.share:.1%}", d.reduction, f"{d.er:.3f}", f"{100 * d.hr:.1f}") for d in found.poisoning]
    heads = ("attack", "clients", "reduction", "ER@10 of the target", "HR@10, 1+99")
    return [*tables, *([Table(f"{title}: malicious clients", heads, tuple(harm))] if harm else [])]
