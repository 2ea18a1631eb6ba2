"""What a folder of a deployment tells about itself."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from fedmosaic.core.files import is_locked, load_tensors, read_lines
from fedmosaic.deploy.admission import REQUEST, Request
from fedmosaic.deploy.agreement import Agreement
from fedmosaic.deploy.coordinator import STATE
from fedmosaic.deploy.fleet import Link, ServerFolder
from fedmosaic.deploy.history import HISTORY
from fedmosaic.deploy.node import LOG, in_words
from fedmosaic.deploy.node import STATE as NODE_STATE
from fedmosaic.deploy.roster import ROSTER, read_roster
from fedmosaic.deploy.work import work_of


def status_of(place: Path) -> dict[str, Any]:
    """A server's rounds, nodes and refusals, or what a node holds and has taken part in."""
    return _server(place) if (place / ROSTER).is_file() else _node(place)


def _server(place: Path) -> dict[str, Any]:
    folder = ServerFolder(place)
    done = load_tensors(place / STATE)[1]["round"] if (place / STATE).is_file() else 0
    refused = Counter(line["reason"] for line in read_lines(place / "refused.jsonl"))
    last: dict[str, Any] = next(iter(read_lines(place / "rounds.jsonl")[-1:]), {})
    invited, admitted = folder.entries(), read_roster(place)
    return {
        "method": folder.agreement.method,
        "federation": folder.agreement.digest(),
        "address": folder.link.address,
        "running": is_locked(place),
        "uploads": "masked" if folder.agreement.secure else "plain",
        "rounds": f"{done} of {work_of(folder.agreement).rounds}",
        "nodes invited": len(invited),
        "nodes": len(admitted),
        "clients": sum(member.users for member in admitted.values()),
        "last round": json.dumps(last) if last else "none",
        "refused": ", ".join(f"{reason} {count}" for reason, count in refused.most_common()) or "nothing",
    }


def _node(place: Path) -> dict[str, Any]:
    agreement = Agreement.read(place)
    tensors, meta = load_tensors(place / NODE_STATE) if (place / NODE_STATE).is_file() else ({}, {})
    lines = read_lines(place / LOG)
    sent = [line for line in lines if line["event"] == "sent"]
    return {
        "method": agreement.method,
        "federation": agreement.digest(),
        "server": Link.read(place).address,
        "running": is_locked(place),
        "keys": f"generation {Request.read(place).generation}" if (place / REQUEST).is_file() else "not made yet",
        "history": "here" if (place / HISTORY).is_file() else "not yet: --history brings it",
        "last round": meta.get("round", 0),
        "holds the server's version": meta.get("version", "none"),
        "rounds taken part in": len({line["round"] for line in sent}),
        "bytes sent": sum(line["bytes"] for line in sent),
        "all of it masked": all(line["masked"] for line in sent) if sent else "nothing was sent",
        "epsilon spent": max((line["epsilon"] for line in sent if "epsilon" in line), default="none was agreed"),
        "refused here": sum(line["event"] == "refused" for line in lines),
        "last": f"{lines[-1]['time']}  {in_words(lines[-1])}" if lines else "nothing yet",
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
