"""The results of run.py as a picture: requests a second of everybody, by case.

usage: python bench/proxy/plot.py RESULTS.json PICTURE.svg     with matplotlib
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

# The same results give the same file, but for what changed.
matplotlib.rcParams["svg.hashsalt"] = "baton"
SKIPPED = "direct"


def main(results: str, picture: str) -> None:
    by_case = json.loads(Path(results).read_text())
    cases = list(by_case)
    names = [name for name in by_case[cases[0]] if name != SKIPPED]
    figure, axes = plt.subplots(figsize=(11, 5))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        rates = [statistics.median(run["requests_per_s"] for run in by_case[case][name]) for case in cases]
        axes.bar([at + place * width for at in range(len(cases))], rates, width, label=name)
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(cases))], cases, rotation=20, ha="right", fontsize=8)
    axes.set_ylabel("requests a second")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:3])
