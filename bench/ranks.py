"""The command `python -m bench.ranks`: two ranks save, each its shards, and one process loads all.

Takes the arguments of `python -m bench`, and reports in the same way.
"""

import sys

from bench.command import run
from bench.report import BEST_PEER, Target
from bench.shards import METHODS

TARGETS = (
    Target("durable, fresh blocks", "holdfast_ranks", "durable", "dcp_ranks", 0.42),
    Target("durable, fresh blocks", "holdfast_ranks", "durable", BEST_PEER),
    Target("durable, fresh blocks", "holdfast_ranks", "durable", "holdfast", 1.0),
    Target("durable, recycled", "holdfast_recycled_ranks", "durable", "dcp_ranks", 0.30),
    Target("durable, recycled", "holdfast_recycled_ranks", "durable", BEST_PEER),
    Target("durable, recycled", "holdfast_recycled_ranks", "durable", "holdfast_recycled", 1.0),
    Target("cold load, 2 ranks to 1", "holdfast_ranks", "load_cold", "dcp_ranks", 0.60),
    Target("warm load, 2 ranks to 1", "holdfast_ranks", "load_warm", "dcp_ranks", 0.25),
    Target("durable, fresh blocks", "holdfast_ranks", "durable", "disk"),
    Target("durable, recycled", "holdfast_recycled_ranks", "durable", "disk"),
    Target("cold load, 2 ranks to 1", "holdfast_ranks", "load_cold", "disk"),
)

if __name__ == "__main__":
    sys.exit(run("bench.ranks", METHODS, TARGETS))
