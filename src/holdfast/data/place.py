"""Which rank of how many this process is, for whoever deals out data.

The default is torch.distributed's, looked up when it is needed. A job that was launched with several ranks but has no
process group yet is an error, not rank 0 of 1: each rank would then read all of the data.
"""

from __future__ import annotations

import os

from ..errors import Refused


def place(rank: int | None, world: int | None) -> tuple[int, int]:
    """(rank, world), from the arguments or from torch.distributed; (0, 1) for a job of one process.

    Raises:
        ValueError: only one of the two is given, or they do not fit each other.
        Refused: the launcher started several ranks, and the process group is not initialised.
    """
    if (rank is None) != (world is None):
        raise ValueError("give both rank= and world=, or neither")
    if rank is None or world is None:
        rank, world = _from_torch()
    if not 0 <= rank < world:
        raise ValueError(f"there is no rank {rank} among {world}")
    return rank, world


def _from_torch() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched.isdecimal() and int(launched) > 1:
        raise Refused(
            f"{launched} ranks were launched (WORLD_SIZE), but the process group is not initialised: each would read all data; "
            "call torch.distributed.init_process_group first, or give rank= and world="
        )
    return 0, 1
