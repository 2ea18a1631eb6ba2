"""Figures: colours that the colour-blind can tell apart, markers and dashes beside them, SVG and PNG of each.

Every function takes plain numbers and returns a matplotlib figure; `save` writes both forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from fedmosaic.core.errors import SettingsError

# Okabe & Ito; black first, so that one curve alone is black
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C00")
MARKERS = "osD^vPX*"
LEGEND_LINE = 0.19  # inches
DASHES = ("-", "--", "-.", ":")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedmosaic",  # the same figure gives the same file
}


def pyplot() -> Any:
    """matplotlib's pyplot, without a screen."""
    try:
        import matplotlib
    except ImportError:
        raise SettingsError("figures need matplotlib: pip install 'fedmosaic[reproduce]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(STYLE)
    return plt


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write NAME.svg and NAME.png, and close the figure."""
    folder.mkdir(parents=True, exist_ok=True)
    places = [folder / f"{name}.svg", folder / f"{name}.png"]
    figure.savefig(places[0], metadata={"Date": None})
    figure.savefig(places[1], dpi=144)
    pyplot().close(figure)
    return places


def mark(number: int) -> dict[str, Any]:
    """Colour, marker and dash of a curve; when the colours begin again, the others go on by one.

    >>> mark(0) != mark(8), mark(0)["color"] == mark(8)["color"]
    (True, True)
    """
    turned = number + number // len(COLOURS)
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[turned % len(MARKERS)],
        "linestyle": DASHES[turned % len(DASHES)],
    }


def curves(
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    xs: Sequence[str],
    y: str,
    *,
    log: Sequence[bool] = (),
) -> Any:
    """One panel per entry: {panel: {curve: (x, y)}}, with the panels' x labels and the common y label."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.2), sharey=True, squeeze=False)
    for at, (title, lines) in enumerate(panels.items()):
        axis = axes[0][at]
        for number, (name, (x, values)) in enumerate(lines.items()):
            axis.plot(x, values, label=name, markevery=max(1, len(x) // 8), markersize=4, **mark(number))
        axis.set_title(title)
        axis.set_xlabel(xs[at])
        if at < len(log) and log[at]:
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter("")
    axes[0][0].set_ylabel(y)
    _legend(figure, axes[0][0], max(len(lines) for lines in panels.values()))
    return figure


def _legend(figure: Any, axis: Any, count: int) -> None:
    handles, labels = axis.get_legend_handles_labels()
    letters = max((len(label) for label in labels), default=1)
    fitting = max(1, int(figure.get_size_inches()[0] / (0.55 + 0.085 * letters)))
    labels = [label.replace("$", r"\$") for label in labels]  # names of files are not formulas
    columns = min(fitting, max(1, count))
    more = -(-len(labels) // columns) - 2
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE * max(0, more))  # a long legend does not eat the plot
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def sensitivity(panels: Mapping[str, tuple[Sequence[str], Mapping[str, Sequence[float | None]]]], y: str) -> Any:
    """{panel: (values as categories, {curve: y})}: one setting at a time."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.0), squeeze=False)
    for axis, (title, (categories, lines)) in zip(axes[0], panels.items(), strict=True):
        at = np.arange(len(categories))
        for number, (name, values) in enumerate(lines.items()):
            axis.plot(at, [np.nan if v is None else v for v in values], label=name, **mark(number))
        axis.set_xticks(at, categories)
        axis.set_title(title)
    axes[0][0].set_ylabel(y)
    _legend(figure, axes[0][0], max(len(lines) for _, lines in panels.values()))
    return figure


def bars(groups: Mapping[str, Mapping[str, float]], y: str) -> Any:
    """{group: {bar: height}}, with the heights written above."""
    plt = pyplot()
    names = list(next(iter(groups.values())))
    figure, axis = plt.subplots(figsize=(1.2 + 0.55 * len(groups) * len(names), 3.0))
    wide = 0.8 / len(names)
    for number, name in enumerate(names):
        at = np.arange(len(groups)) + (number - (len(names) - 1) / 2) * wide
        drawn = axis.bar(
            at, [g[name] for g in groups.values()], wide * 0.92, label=name, color=mark(1 + number)["color"],
            hatch=("", "//", "..", "xx")[number % 4], edgecolor="white",
        )  # fmt: skip
        axis.bar_label(drawn, fmt="%.1f", fontsize=7)
    axis.set_xticks(np.arange(len(groups)), [fill(name, 7 * len(names)) for name in groups])
    axis.set_ylabel(y)
    _legend(figure, axis, len(names))
    return figure


def scatters(panels: Mapping[str, tuple[Any, Any]], groups: Sequence[str], *, columns: int = 4) -> Any:
    """{panel: (points [n, 2], group of each)}: the last group is drawn on top."""
    plt = pyplot()
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(2.9 * columns, 2.9 * lines), squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, (title, (points, group)) in zip(axes.flat, panels.items(), strict=False):
        for number, name in enumerate(groups):
            part = points[group == number]
            axis.scatter(
                part[:, 0], part[:, 1], s=(5, 16)[min(number, 1)], color=("#B8B8B8", "#0072B2", "#D55E00")[number],
                marker="o^s"[number], alpha=0.8, linewidths=0, label=name, rasterized=True,
            )  # fmt: skip
        axis.set_title(title)
    _legend(figure, axes[0][0], len(groups))
    return figure


def spectra(tables: Mapping[str, Sequence[float]]) -> Any:
    """Singular values relative to the largest, on a logarithmic axis."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(5.2, 3.4))
    for number, (name, values) in enumerate(tables.items()):
        relative = np.asarray(values) / max(values[0], 1e-12)
        axis.plot(np.arange(1, len(relative) + 1), relative, label=name, markersize=3, **mark(number))
    axis.set_yscale("log")
    axis.set_xlabel("singular value")
    axis.set_ylabel("relative to the largest")
    _legend(figure, axis, 2)
    return figure


def landscapes(surfaces: Mapping[str, tuple[Any, Any]], *, words: str) -> Any:
    """{model: (steps, losses [n, n])}: surfaces above, contours below, one scale for all."""
    plt = pyplot()
    low = min(float(np.min(v)) for _, v in surfaces.values())
    high = max(float(np.max(v)) for _, v in surfaces.values())
    figure = plt.figure(figsize=(3.8 * len(surfaces), 6.4))
    levels = np.linspace(low, high if high > low else low + 1e-9, 13)
    for at, (name, (steps, losses)) in enumerate(surfaces.items()):
        a, b = np.meshgrid(steps, steps, indexing="ij")
        top = figure.add_subplot(2, len(surfaces), at + 1, projection="3d")
        top.plot_surface(a, b, losses, cmap="cividis", vmin=low, vmax=high)
        top.set_zlim(low, high)
        top.set_title(name)
        flat = figure.add_subplot(2, len(surfaces), len(surfaces) + at + 1)
        drawn = flat.contourf(a, b, losses, levels=levels, cmap="cividis")
        flat.contour(a, b, losses, levels=levels, colors="white", linewidths=0.4)
        flat.set_aspect("equal")
        for one in (top, flat):
            one.locator_params(nbins=3)
        flat.set_xlabel("first direction")
        flat.set_ylabel("second direction" if at == 0 else "")
    figure.colorbar(drawn, ax=figure.axes, label=words, shrink=0.6)
    return figure


def pool_effect(rows: Mapping[str, Mapping[str, float]], chance: float, x: str) -> Any:
    """A line per method from its value under one pool to that under the other; chance as a line."""
    plt = pyplot()
    pools = list(next(iter(rows.values())))
    figure, axis = plt.subplots(figsize=(6.2, 0.9 + 0.32 * len(rows)))
    for at, values in enumerate(rows.values()):
        ends = [values[p] for p in pools]
        axis.plot(ends, [at] * len(ends), color="#999999", linewidth=1.5, zorder=1)
        for number, end in enumerate(ends):
            label = pools[number] if at == 0 else None
            axis.scatter(end, at, color=COLOURS[(2, 1)[number % 2]], marker="os"[number % 2], zorder=2, label=label)
    axis.axvline(chance, color="#888888", linestyle=":", linewidth=1)
    axis.text(chance, 0, " chance", fontsize=7, va="center")
    axis.set_yticks(np.arange(len(rows)), list(rows))
    axis.invert_yaxis()
    axis.set_xlabel(x)
    _legend(figure, axis, len(pools))
    return figure
