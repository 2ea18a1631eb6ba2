"""Answers over HTTP: requests per second, times and memory, beside a peer's, in one run on one machine.

    python benchmarks/serving.py [--peer PYTHON] [--items 3706 50000] [--requests 2000]

Lists of ten from a history of twenty items that comes with the request, over eight connections that stay open, on the
loopback address. The client runs on the same machine, so both servers share its processors with it. The peer is what
people put together by hand: iALS of `implicit` (64 numbers per item, the user solved for in every request) behind Flask
and Gunicorn (one process, four threads); --peer names a Python that has implicit, flask and gunicorn. Both servers have
one thread of linear algebra.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

CONNECTIONS = 8
PEER = """
import sys, numpy as np
from flask import Flask, jsonify, request
from implicit.cpu.als import AlternatingLeastSquares
from scipy.sparse import csr_matrix
rows = np.load(sys.argv[1])
matrix = csr_matrix((np.ones(len(rows), np.float32), (rows[:, 0], rows[:, 1])))
model = AlternatingLeastSquares(factors=64, iterations=3, num_threads=2)
model.fit(matrix, show_progress=False)
app = Flask(__name__)

@app.get("/health")
def health():
    return "ok"

@app.post("/recommend")
def recommend():
    items = np.array(request.json["history"], np.int64)
    where = (np.zeros(items.size, np.int64), items)
    held = csr_matrix((np.ones(items.size, np.float32), where), shape=(1, matrix.shape[1]))
    ids, scores = model.recommend(0, held, N=10, recalculate_user=True)
    return jsonify(items=[{"item": int(i), "score": float(s)} for i, s in zip(ids, scores)])

from gunicorn.app.base import BaseApplication

class Server(BaseApplication):
    def load_config(self):
        given = {"bind": "127.0.0.1:" + sys.argv[2], "workers": 1, "threads": 4, "loglevel": "error"}
        for name, value in given.items():
            self.cfg.set(name, value)

    def load(self):
        return app

Server().run()
"""


def events(items: int, users: int = 6_000, each: int = 100) -> np.ndarray:
    """Rows of (user, item, time); some items are met far more often than others, and none by nobody."""
    rng = np.random.default_rng(0)
    drawn = np.minimum((items * rng.random((users, each)) ** 2.5).astype(np.int64), items - 1)
    drawn[rng.integers(0, users, items), rng.integers(0, each, items)] = np.arange(items)
    return np.stack([np.repeat(np.arange(users), each), drawn.ravel(), np.tile(np.arange(each), users)], axis=1)


def load(port: int, requests: int, items: int) -> np.ndarray:
    """Seconds of every request, asked over several connections at once."""
    rng = np.random.default_rng(1)
    bodies = [json.dumps({"history": rng.choice(items, 20, replace=False).tolist()}) for _ in range(64)]
    taken: list[float] = []

    def ask(share: int) -> None:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for n in range(share):
            began = time.perf_counter()
            link.request("POST", "/recommend", bodies[n % 64], {"Content-Type": "application/json"})
            answer = link.getresponse()
            found = json.loads(answer.read())
            taken.append(time.perf_counter() - began)
            assert answer.status == 200, found
            assert len(found["items"]) == 10

    threads = [threading.Thread(target=ask, args=(requests // CONNECTIONS,)) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return np.array(taken)


def measured(name: str, command: list[str], port: int, requests: int, items: int) -> str:
    """Start a server, ask it, end it; a line of a table."""
    server = subprocess.Popen(command, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    try:
        for _ in range(600):
            try:
                link = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
                link.request("GET", "/health")
                link.getresponse().read()
                break
            except OSError:
                time.sleep(0.5)
        load(port, 64, items)  # what is compiled or loaded at the first request
        began = time.perf_counter()
        taken = load(port, requests, items)
        wall = time.perf_counter() - began
        pids = [server.pid, *map(int, Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split())]
        memory = max(_resident(pid) for pid in pids)
        p50, p99 = np.quantile(taken, [0.5, 0.99]) * 1e3
        return f"| {name} | {items:,} | {taken.size / wall:.0f} | {p50:.1f} | {p99:.1f} | {memory:.0f} |"
    finally:
        server.terminate()
        server.wait(timeout=30)


def _resident(pid: int) -> float:
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def main() -> None:
    from fedmosaic import FederatedRecommender

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python with implicit, flask and gunicorn")
    parser.add_argument("--items", type=int, nargs="+", default=[3_706, 50_000])
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--port", type=int, default=8765)
    options = parser.parse_args()
    print("| server | items | requests a second | median ms | p99 ms | MB |\n|---|--:|--:|--:|--:|--:|", flush=True)
    for items in options.items:
        with tempfile.TemporaryDirectory() as folder:
            rows = events(items)
            table = {"user": rows[:, 0], "item": rows[:, 1], "time": rows[:, 2]}
            FederatedRecommender("mosaic", rank=64).fit(table, time="time").save(Path(folder) / "model")
            np.save(Path(folder) / "rows.npy", rows[:, :2])
            ours = [sys.executable, "-m", "fedmosaic", "serve", f"{folder}/model", "--port", str(options.port)]
            print(measured("fedmosaic serve, mosaic rank=64", ours, options.port, options.requests, items), flush=True)
            if options.peer:
                peer = [options.peer, "-c", PEER, f"{folder}/rows.npy", str(options.port + 1)]
                line = measured("implicit iALS, Flask, Gunicorn", peer, options.port + 1, options.requests, items)
                print(line, flush=True)


if __name__ == "__main__":
    main()
