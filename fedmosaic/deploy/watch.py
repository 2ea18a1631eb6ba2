"""Who looks on while a server runs: a live table for people, and figures for Prometheus."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fedmosaic.core.extras import require_extra
from fedmosaic.deploy.coordinator import Coordinator
from fedmosaic.deploy.gate import Gate

SHOWN = 8  # rounds of the live table


class Metrics:
    """Figures of a running server, at http://127.0.0.1:PORT/metrics."""

    def __init__(self, gate: Gate, one: Coordinator) -> None:
        self.gate, self.one = gate, one
        self._round: Callable[[dict[str, Any]], None] = lambda line: None

    def round(self, line: dict[str, Any]) -> None:
        """A round was committed."""
        self._round(line)

    @contextmanager
    def served(self, port: int | None) -> Iterator[Metrics]:
        """Answer on a port of the loopback interface; nothing where there is none."""
        if port is None:
            yield self
            return
        require_extra("metrics", "prometheus_client", "prometheus-client", "flower")
        from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

        registry = CollectorRegistry()

        def gauge(name: str, what: str, value: Callable[[], float]) -> None:
            Gauge(f"fedmosaic_{name}", what, registry=registry).set_function(value)

        gauge("version", "committed rounds", lambda: self.one.version)
        gauge("nodes_admitted", "nodes of the roster", lambda: len(self.one.roster()))
        gauge("nodes_there", "nodes that can be reached", lambda: len(self.one.desk.there()))
        gauge("lines_open", "open lines", lambda: len(self.gate.lines.keys))
        gauge("bytes_in", "bytes of answers", lambda: self.gate.mailbox.bytes_in)
        gauge("bytes_out", "bytes of messages", lambda: self.gate.mailbox.bytes_out)
        gauge("requests_refused", "requests and lines refused", lambda: sum(self.gate.lines.refused.values()))
        counted = {
            name: Counter(f"fedmosaic_{name}", what, registry=registry)
            for name, what in (
                ("clients", "clients counted, over rounds"), ("refused", "answers that did not count"),
                ("seconds", "seconds of rounds"), ("abandoned", "attempts that were given up"),
            )
        }  # fmt: skip

        def count(line: dict[str, Any]) -> None:
            for name, counter in counted.items():
                counter.inc(line[name])

        self._round = count
        server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join(5.0)


class Watch:
    """A table in the terminal: rounds as they are committed, and nodes."""

    def __init__(self, gate: Gate, one: Coordinator) -> None:
        self.gate, self.one = gate, one
        self.lines: deque[dict[str, Any]] = deque(maxlen=SHOWN)

    @contextmanager
    def shown(self) -> Iterator[Callable[[dict[str, Any]], None]]:
        """While the context lasts; gives what is to be told of every round."""
        from rich.live import Live

        with Live(get_renderable=self._table, refresh_per_second=2):
            yield self.lines.append

    def _table(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        rounds = Table(title=f"round {self.one.version} of {self.one.work.rounds}")
        for name in ("round", "clients", "nodes", "refused", "seconds", "kB up", "kB down"):
            rounds.add_column(name, justify="right")
        for line in self.lines:
            sizes = [f"{line[k] / 1000:,.0f}" for k in ("bytes_up", "bytes_down")]
            rounds.add_row(*(str(line[k]) for k in ("round", "clients", "nodes", "refused", "seconds")), *sizes)
        nodes = Table(title=f"nodes, {time.strftime('%H:%M:%S')}")
        for name in ("node", "users", "is", "holds version"):
            nodes.add_column(name)
        there, free = self.one.desk.there(), self.one.desk.free()
        for name, member in list(self.one.roster().items())[:20]:
            state = "waiting" if name in free else "at work" if name in there else "away"
            nodes.add_row(name, str(member.users), state, str(self.one.desk.holds.get(name, "")))
        refused = ", ".join(f"{reason} {count}" for reason, count in self.gate.lines.refused.items()) or "nothing"
        return Group(rounds, nodes, f"the gate refused: {refused}")
