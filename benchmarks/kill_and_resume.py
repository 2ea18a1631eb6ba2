"""kill -9 a training run at random moments, resume it each time, and compare its final bytes with an undisturbed run.

python benchmarks/kill_and_resume.py [--times 50]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from fedmosaic.runs.run import resume, start
from fedmosaic.runs.settings import Settings
from fedmosaic.testing import final_bytes, kill_at_random


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    given = {"users": 2000, "items": 500, "per_user": 20, "rounds": 9000, "participation": 0.5, "item_rate": 100.0}
    settings = Settings.make("pfedrec", "synthetic", given)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        start(settings, place / "whole")
        config = str(place / "whole" / "config.toml")
        found = kill_at_random(config, place / "cut", times=args.times, seed=args.seed, longest=5.0)
        resume(place / "cut")
        same = final_bytes(place / "cut") == final_bytes(place / "whole")
    print(f"{args.times} kills, {found} of them while the run was alive; final bytes equal: {same}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
