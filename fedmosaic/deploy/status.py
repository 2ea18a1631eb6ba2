"""What a folder of a deployment tells about itself."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from fedmosaic.core.files import load_tensors, read_lines
from fedmosaic.deploy.agreement import Agreement
from fedmosaic.deploy.coordinator import STATE
from fedmosaic.deploy.fleet import ROSTER, ServerFolder
from fedmosaic.deploy.node import STATE as NODE_STATE


def status_of(place: Path) -> dict[str, Any]:
    """A server's rounds, nodes and refusals, or what a node holds."""
    return _server(place) if (place / ROSTER).is_file() else _node(place)


def _server(place: Path) -> dict[str, Any]:
    folder = ServerFolder(place)
    done = load_tensors(place / STATE)[1]["round"] if (place / STATE).is_file() else 0
    refused = Counter(line["reason"] for line in read_lines(place / "refused.jsonl"))
    last: dict[str, Any] = next(iter(read_lines(place / "rounds.jsonl")[-1:]), {})
    roster = folder.entries()
    return {
        "method": folder.agreement.method,
        "federation": folder.agreement.digest(),
        "address": folder.link.address,
        "rounds": f"{done} of {folder.agreement.build().rounds}",
        "nodes": len(roster),
        "clients": sum(int(e["users"]) for e in roster.values()),
        "last round": json.dumps(last) if last else "none",
        "refused": ", ".join(f"{reason} {count}" for reason, count in refused.most_common()) or "nothing",
    }


def _node(place: Path) -> dict[str, Any]:
    agreement = Agreement.read(place)
    tensors, meta = load_tensors(place / NODE_STATE) if (place / NODE_STATE).is_file() else ({}, {})
    return {
        "method": agreement.method,
        "federation": agreement.digest(),
        "history": "here" if (place / "history.parquet").is_file() else "not yet: --history brings it",
        "last round": meta.get("round", 0),
        "holds the server's version": meta.get("version", "none"),
        "bytes kept": sum(v.nbytes for v in tensors.values()),
    }


def costs(lines: list[dict[str, Any]]) -> dict[str, float]:
    """What rounds cost on average: seconds, bytes per node."""
    count, nodes = len(lines), sum(line["nodes"] for line in lines) or 1
    return {
        "rounds": count,
        "seconds per round": sum(line["seconds"] for line in lines) / count,
        "bytes up per node and round": sum(line["bytes_up"] for line in lines) / nodes,
        "bytes down per node and round": sum(line["bytes_down"] for line in lines) / nodes,
        "refused": sum(line["refused"] for line in lines),
    }
