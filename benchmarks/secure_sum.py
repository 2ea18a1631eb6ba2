"""What a secure sum costs and survives: CPU of a client and of the server, bytes, and who is summed when some are lost.

python benchmarks/secure_sum.py [--numbers 53824] [--clients 100 1000] [--bits 32 64]

CPU milliseconds are medians over clients, of both exchanges; of the server, seconds for all. Plain is float32. For the
last column the graph alone is asked, over 50 draws of who is lost.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np

from fedmosaic.privacy.secure_sum import Pair, Party, SumTerms, TooFewError, arrived, letters_to, opened
from fedmosaic.report.console import print_table

DRAWS = 50


def held(clients: int, numbers: int, bits: int, lost: float, late: float) -> list[str]:
    """One sum, with some lost before they send and some before they open."""
    rng = np.random.default_rng(0)
    terms = SumTerms("bench", 1, "", tuple(range(clients)), bits=64 if bits == 64 else 32)
    order = rng.permutation(clients).tolist()
    gone, silent = set(order[: int(lost * clients)]), set(order[int(lost * clients) : int((lost + late) * clients)])
    values = rng.integers(-(2**15), 2**15, (clients, numbers))
    keys = {i: Pair.new() for i in terms.parties}
    publics = {i: pair.public for i, pair in keys.items()}
    parties, letters, taken = {}, {}, []
    masked = np.zeros(numbers, terms.words)
    here = arrived(terms, set(terms.parties) - gone)
    for i in here:
        began = time.process_time()
        parties[i] = Party.begin(i, keys[i], publics, terms)
        upload = parties[i].mask(values[i])
        taken.append(time.process_time() - began)
        masked, letters[i] = masked + upload.masked, upload.letters
    openings, opening = {}, []
    for i in here:
        if i not in silent:
            began = time.process_time()
            openings[i] = parties[i].open(here, letters_to(i, letters, here))
            opening.append(time.process_time() - began)
    began = time.process_time()
    try:
        exact = bool((opened(terms, masked, here, openings) == values[list(here)].sum(axis=0)).all())
        outcome = "exact" if exact else "WRONG"
    except TooFewError as error:
        outcome = f"ended: {error}"
    server = time.process_time() - began
    up = upload.nbytes + max(one.nbytes for one in openings.values())
    return [
        f"{clients:,}", str(bits), f"{lost:.0%} / {late:.0%}", f"{1000 * statistics.median(taken):.0f} + "
        f"{1000 * statistics.median(opening):.1f}", f"{server:.2f}", f"{up / (4 * numbers):.2f}x",
        f"{len(here) / (clients - len(gone)):.1%}", outcome,
    ]  # fmt: skip


def kept(clients: int, lost: float) -> str:
    """Least and mean share of the survivors that is summed."""
    found = []
    for draw in range(DRAWS):
        terms = replace(SumTerms("bench", 1, "", tuple(range(clients))), round=draw)
        order = np.random.default_rng(draw).permutation(clients)[int(lost * clients) :]
        try:
            found.append(len(arrived(terms, order.tolist())) / order.size)
        except TooFewError:
            found.append(0.0)
    return f"{min(found):.1%}, {statistics.mean(found):.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=53_824)
    parser.add_argument("--clients", nargs="*", type=int, default=[100, 1000])
    parser.add_argument("--bits", nargs="*", type=int, default=[32, 64])
    args = parser.parse_args()
    rows = []
    for clients in args.clients:
        for bits in args.bits:
            for lost, late in ((0.0, 0.0), (0.1, 0.05), (1 / 3, 0.0)):
                rows.append(held(clients, args.numbers, bits, lost, late))
    heads = ["clients", "bits", "lost / late", "client, CPU ms", "server, CPU s", "bytes up", "summed", "result"]
    print_table(f"{args.numbers:,} numbers", heads, rows)
    graph = [[f"{n:,}", f"{lost:.0%}", kept(n, lost)] for n in args.clients for lost in (0.1, 0.2, 1 / 3, 0.4)]
    print_table("survivors that are summed", ["clients", "lost", f"least and mean of {DRAWS} draws"], graph)


if __name__ == "__main__":
    main()
