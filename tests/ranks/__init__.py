"""Persistent pools of ranks: torch is imported once, a world of gloo ranks is made once and used by many tests.

    from ranks import pool, RanksFailed, RankDied, RankTimeout

    def half(x):                                  # at module level: ranks import it by name
        return torch.distributed.get_rank(), x / 2

    def test_something(tmp_path):
        assert pool(2).run(half, 3.0) == [(0, 1.5), (1, 1.5)]          # results by rank
        pool(2).run(half, None, timeout=10)                            # raises RanksFailed: each rank's traceback, in .errors
        pool(2).run(half, None, catch=True)                            # [TypeError(...), TypeError(...)]
        started = pool(2).start(half, 3.0)                             # without waiting
        started.kill(1)                                                # SIGKILL; a rank may also kill itself
        started.results(timeout=10, catch=True)                        # [..., RankDied(...)]

A rank has what torchrun gives: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, and the default process group, whose
store lives in a process of its own as torchrun's does, so that it outlives every rank. Each run begins with the same seeds,
environment, working directory (that of the test) and one thread. A pool in which a rank died, timed out, or raised without
`catch` is thrown away, and `pool(n)` makes another, in some 0.2 s; `pool(n, fresh=True)` always does. What ranks print is
printed by the test. A conftest that imports `no_ranks_left` from `ranks.fixture` ends all pools with the session.
"""

from .errors import RankDied, RankError, RanksFailed, RankTimeout
from .pools import Pool, close_all, pool

__all__ = ["Pool", "RankDied", "RankError", "RankTimeout", "RanksFailed", "close_all", "pool"]
