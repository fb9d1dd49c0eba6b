"""The command: `python -m bench`, with SIZE=full|small and ROUNDS=n in the environment."""

import sys

from bench.command import run
from bench.methods import METHODS
from bench.report import TARGETS

if __name__ == "__main__":
    sys.exit(run("bench", METHODS, TARGETS))
