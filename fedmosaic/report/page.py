"""One self-contained HTML page from run folders: no network, no server, light and dark, on a phone too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from fedmosaic.core.errors import RunError
from fedmosaic.core.machine import environment
from fedmosaic.report.chart import Panel, chart
from fedmosaic.report.curves import HR, validation_curve
from fedmosaic.runs.ledger import Record
from fedmosaic.runs.run import load_ranks
from fedmosaic.runs.run_folder import RunFolder
from fedmosaic.runs.settings import OF_FILES, Settings
from fedmosaic.serving.recommender import FederatedRecommender

LIST = 10
HISTORY = 40  # newest items of a history that are shown
COLUMNS = (("full", "hr@10"), ("full", "ndcg@10"), ("sampled", "hr@10"), ("sampled", "ndcg@10"))

WHICH_ROWS = ("min_rating", "min_user_rows", "lenient")  # of what is said about files, that which changes the data


def write_page(
    places: Sequence[str | Path], out: str | Path, *, users: int = 40, tell: Callable[[str], None] | None = None
) -> Path:
    """Write the page of some finished runs; `users` of them can be looked at one by one."""
    from jinja2 import Environment, StrictUndefined

    say = tell or (lambda text: None)
    runs = _runs(places)
    context: dict[str, Any] = {
        "words": _words(runs),
        "tables": _tables(runs),
        "figures": [],
        "costs": [_cost(r) for r in runs],
        "groups": [_groups(r) for r in runs],
        "protocols": sorted({(r.summary["dataset"], r.summary["protocol"]) for r in runs}),
        "versions": environment(),
    }
    for title, draw in (("curves", _curves), ("users", _distribution), ("gains", _gains), ("spectra", _spectra)):
        say(f"drawing {title}")
        context["figures"] += draw(runs)
    say("asking the models")
    context["panel"] = json.dumps(_panel(runs, users, say)).replace("<", "\\u003c")
    template = (resources.files("fedmosaic.report") / "page.html").read_text()
    page = Environment(autoescape=True, undefined=StrictUndefined).from_string(template).render(context)
    place = Path(out)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(page)
    return place


class _Run:
    """A finished run, read once."""

    def __init__(self, place: str | Path) -> None:
        folder = RunFolder.open(place)
        self.folder, self.summary, self.settings = folder, folder.summary(), folder.settings()
        self.name = ""

    @cached_property
    def group(self) -> tuple[str, str]:
        """Runs of one group hid the same items from the same users, among the same candidates."""
        hidden = hashlib.sha256(str(self.settings.candidates).encode())
        for protocol in ("full", "sampled"):
            ranks = load_ranks(self.folder.place, protocol)
            for part in (ranks.user, ranks.item, ranks.candidates):
                hidden.update(part.tobytes())
        return self.summary["dataset"], hidden.hexdigest()


def _runs(places: Sequence[str | Path]) -> list[_Run]:
    runs = [_Run(place) for place in dict.fromkeys(Path(p).resolve() for p in places)]
    if not runs:
        raise RunError("name at least one finished run folder")
    for run in runs:
        run.name = _name(run.settings, [r.settings for r in runs])
    for run in [r for r in runs if sum(o.name == r.name for o in runs) > 1]:
        run.name += f" ({run.folder.place.name})"
    return runs


def _name(one: Settings, others: Sequence[Settings]) -> str:
    """The method, and whatever else tells this run from the others of the method."""
    rest = [o for o in others if o is not one and o.method == one.method]
    parts = [one.method]
    if any(o.pool != one.pool for o in others):
        parts.append(one.pool)
    if any(o.method_settings != one.method_settings for o in rest):
        parts += [f"{k}={v}" for k, v in one.method_settings.items()]
    for key in Settings.model_fields:
        told = key in ("method", "pool", "method_settings", "dataset", *OF_FILES) and key not in WHICH_ROWS
        if not told and any(getattr(o, key) != getattr(one, key) for o in rest):
            parts.append(f"{key}={getattr(one, key)}")
    if len({o.dataset for o in others}) > 1:
        parts.append(Path(one.dataset).name)
    return " ".join(parts)


def _words(runs: Sequence[_Run]) -> list[str]:
    """What a reader should take away, in sentences."""
    found = []
    for group in dict.fromkeys(r.group for r in runs):
        members = [r for r in runs if r.group == group]
        first = members[0].summary
        counts, popular = first["counts"], first["reference"]["popularity"]["full"]["hr@10"]
        honest = [r for r in members if r.settings.pool == "strict" and not r.settings.straddle]
        text = (
            f"{first['dataset']}: {counts['users']:,} users, {counts['items']:,} items, {counts['evaluated']:,} users "
            f"evaluated. A list of ten of the most popular items holds the hidden item for {100 * popular:.1f} % of "
            f"users, a random list for {100 * first['reference']['chance']['full']['hr@10']:.1f} %."
        )
        if honest:
            best = max(honest, key=lambda r: r.summary["test"]["full"]["hr@10"])
            value, interval = best.summary["test"]["full"]["hr@10"], best.summary["interval"]["full"]
            text += (
                f" The best of {len(honest)} honest run{'s' * (len(honest) > 1)} is {best.name}: {100 * value:.1f} % "
                f"(95 % interval {100 * interval['low']:.1f} to {100 * interval['high']:.1f})."
            )
        if len(honest) < len(members):
            text += (
                f" {len(members) - len(honest)} run(s) knew what is hidden (training negatives that spare it: pool "
                "legacy or isolated; or repeats among the training rows): such numbers reproduce papers and say "
                "nothing about real use."
            )
        found.append(text)
    return found


def _tables(runs: Sequence[_Run]) -> list[dict[str, Any]]:
    tables = []
    for group in dict.fromkeys(r.group for r in runs):
        members = [r for r in runs if r.group == group]
        reference = members[0].summary["reference"]
        ran = {r.settings.method for r in members}
        rows = [(name, "", reference[name]) for name in ("chance", "popularity") if name not in ran]
        rows += [(r.name, r.settings.pool, r.summary["test"]) for r in members]
        cells = [
            {"name": name, "pool": pool, "values": [f"{100 * result[p][m]:.2f}" for p, m in COLUMNS]}
            for name, pool, result in rows
        ]
        drawn = f"1+{members[0].settings.candidates}"
        columns = ["full HR@10", "full NDCG@10", f"{drawn} HR@10", f"{drawn} NDCG@10"]
        tables.append({"title": members[0].summary["dataset"], "columns": columns, "rows": cells})
    return tables


def _cost(run: _Run) -> dict[str, Any]:
    cost, summary = run.summary["cost"], run.summary
    return {
        "name": run.name,
        "round": f"{summary['best_round']} of {summary['rounds']}",
        "seconds": f"{cost['seconds']:.1f}",
        "memory": f"{cost['peak_mb']:.0f}",
        "up": f"{cost['bytes_up'] / 1000:,.1f}",
        "down": f"{cost['bytes_down'] / 1000:,.1f}",
        "place": str(run.folder.place),
    }


def _groups(run: _Run) -> dict[str, Any]:
    parts = run.summary["test"]["groups"]
    return {
        "name": run.name,
        "rows": [
            (kind, group, f"{v['n']:,.0f}", f"{100 * v['hr@10']:.2f}", f"{100 * v['ndcg@10']:.2f}")
            for kind, groups in parts.items()
            for group, v in groups.items()
        ],
    }


def _figure(panels: Sequence[Panel], caption: str, runs: Sequence[_Run]) -> dict[str, str]:
    return {"svg": chart(panels, [run.name for run in runs]), "caption": caption}


def _curves(runs: Sequence[_Run]) -> list[dict[str, str]]:
    lines = {run.name: validation_curve(Record.of(run.folder)) for run in runs}
    lines = {name: line for name, line in lines.items() if len(line.rounds) > 1}
    if not lines:
        return []
    panels = [
        Panel("by round", "round", HR, {name: (line.rounds, line.values) for name, line in lines.items()}),
        Panel("by time", "seconds", HR, {name: (line.seconds, line.values) for name, line in lines.items()}),
    ]
    words = "Learning: validation HR@10 among the drawn candidates. A first run of a kind compiles in its first round."
    return [_figure(panels, words, runs)]


def _distribution(runs: Sequence[_Run]) -> list[dict[str, str]]:
    """Share of users whose hidden item is within the first k, for every k."""
    lines = {}
    for run in runs:
        middle = np.sort(_best_ranks(run))
        at = np.unique(np.geomspace(1, max(middle[-1], 2), 60).astype(np.int64))
        lines[run.name] = (at.tolist(), [100 * float((middle <= k).mean()) for k in at])
    panel = Panel("all unseen items", "length of the list", "users served (%)", lines, log_x=True)
    return [
        _figure([panel], "Users whose hidden item stands in a list of that length, ranking all unseen items.", runs)
    ]


def _gains(runs: Sequence[_Run]) -> list[dict[str, str]]:
    """Each user's rank under every run against the first run of its group."""
    drawn: list[dict[str, str]] = []
    for group in dict.fromkeys(r.group for r in runs):
        first, *rest = [r for r in runs if r.group == group]
        if rest:
            base = np.log2(_best_ranks(first))
            share = np.linspace(0, 1, 101)
            lines = {
                r.name: (share.tolist(), np.quantile(base - np.log2(_best_ranks(r)), share).tolist()) for r in rest
            }
            panel = Panel(group[0], "share of users, worst first", "halvings of the rank", lines, zero=True)
            words = "Per user: how many times the hidden item's rank halves (up) or doubles (down)"
            drawn.append(_figure([panel], f"{words} against {first.name}, {group[0]}.", runs))
    return drawn


def _best_ranks(run: _Run) -> Any:
    """Per user, the expected rank of the hidden item that stands highest."""
    ranks = load_ranks(run.folder.place, "full")
    best = np.full(ranks.users.size, np.inf)
    np.minimum.at(best, np.searchsorted(ranks.users, ranks.user), ranks.above + ranks.tied / 2 + 1)
    return best


def _spectra(runs: Sequence[_Run]) -> list[dict[str, str]]:
    from fedmosaic.evaluation.spectrum import singular_values

    found = {}
    for run in runs:
        if run.summary.get("table", {}).get("width", 0) > 1:
            try:
                model = run.folder.recommender()
            except RunError:  # the state was dropped to save room
                continue
            values = singular_values(np.asarray(model.method_.vectors(model.state_)))
            relative = (values / max(float(values[0]), 1e-12)).tolist()
            found[run.name] = (list(range(1, len(relative) + 1)), relative)
    panel = Panel("item tables", "singular value", "relative to the largest", found, log_y=True)
    return [_figure([panel], "Singular values of the common item tables.", runs)] if found else []


def _panel(runs: Sequence[_Run], count: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Per group: some users with their histories and lists, titles once."""
    groups = []
    for group in dict.fromkeys(r.group for r in runs):
        members = [r for r in runs if r.group == group]
        chosen: list[Any] = []
        titles: dict[str, str] = {}
        people: dict[str, dict[str, Any]] = {}
        for run in members:
            say(f"lists of {run.name}")
            try:
                model = run.folder.recommender()
            except RunError:
                continue
            if not chosen:
                chosen = _people(model, count)
                people = {str(u): {"history": _history(model, u, titles), "lists": {}} for u in chosen}
            for row in model.recommend(chosen, LIST).to_dicts():
                _know(titles, str(row["item"]), str(row.get("title") or row["item"]))
                people[str(row["user"])]["lists"].setdefault(run.name, []).append(str(row["item"]))
            hidden = load_ranks(run.folder.place, "full")
            for user in chosen:
                at = model.users_.require([user])[0]
                items = [str(i) for i in model.items_.take(hidden.item[hidden.user == at]).to_list()]
                people[str(user)]["hidden"] = items
                for item in items:
                    _know(titles, item, _title(model, item))
        if people:
            groups.append({"data": group[0], "titles": titles, "people": people})
    return groups


def _people(model: FederatedRecommender, count: int) -> list[Any]:
    """Users spread over all sizes of history."""
    order = np.argsort(model.training_.histories.lengths, kind="stable")
    at = order[np.unique(np.linspace(0, order.size - 1, min(count, order.size)).astype(np.int64))]
    return list(model.users_.take(at).to_list())


def _history(model: FederatedRecommender, user: Any, titles: dict[str, str]) -> dict[str, Any]:
    seen = model.training_.histories[int(model.users_.require([user])[0])]
    items = [str(i) for i in model.items_.take(np.asarray(seen[-HISTORY:])[::-1]).to_list()]
    for item in items:
        _know(titles, item, _title(model, item))
    return {"count": len(seen), "items": items}


def _know(titles: dict[str, str], item: str, title: str) -> None:
    """Keep what an item is called; a run without titles takes them from no other."""
    if titles.get(item, item) == item:
        titles[item] = title


def _title(model: FederatedRecommender, item: str) -> str:
    if model.info_ is None:
        return item
    at = model.items_.positions([item])[0]
    return str(model.info_["title"][int(at)] or item) if at >= 0 else item
