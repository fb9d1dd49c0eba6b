"""The data half of a job's state: which samples were consumed, in a form that any number of ranks and workers can go on from.

place       which rank of how many
order       the order of an epoch
deal        global positions, global batches, shares
sampler     Sampler: a batch sampler with one global position
loader      Loader: counts what the trainer consumes
reshard     Reshardable, and where torchdata keeps the state of a worker
stateful    StatefulLoader: torchdata's StatefulDataLoader under other ranks and workers
stream      ShardedStream, TokenStream: iterable datasets that can be resharded

Importing it imports torch; torchdata is never imported here, only met.
"""

from __future__ import annotations

from .loader import Collate, Loader
from .reshard import Reshardable
from .sampler import Sampler
from .stateful import StatefulLoader
from .stream import ShardedStream, TokenStream

__all__ = ["Collate", "Loader", "Reshardable", "Sampler", "ShardedStream", "StatefulLoader", "TokenStream"]
