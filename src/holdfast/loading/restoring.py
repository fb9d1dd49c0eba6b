"""Filling a live state from an open checkpoint: match, read, give the objects what is theirs; alone or with other ranks."""

from __future__ import annotations

from typing import Any

from ..errors import HoldfastError
from ..live import Live
from .checkpoint import Checkpoint
from .fill import fill_from, put, reads_of
from .ledger import Ledger
from .rates import keep_live_rates, tensor_hyper_parameters
from .reading import first_damage
from .together import CHECK, FILL, PUT, Alone, Together
from .wishes import Wishes


def restore_from(
    checkpoint: Checkpoint,
    state: Any,
    wishes: Wishes,
    *,
    all_roles: bool,
    stage: bool = False,
    ranks: Alone | Together | None = None,
) -> Ledger:
    """Fill `state` from an open checkpoint.

    Args:
        all_roles: whether stored roles that the state does not have are a difference. stage: check every byte first.
        ranks: those that load together.
    Raises:
        Mismatch: nothing was touched.  Corrupt: unless `stage`, the state is touched, on all ranks.
    """
    ranks = ranks or Alone()
    team = ranks.team.ranks if isinstance(ranks, Together) else ()
    made: list[Live] = []

    def take_apart() -> Live:
        made.append(state.live(to_fill=True, ranks=team))
        return made[0]

    matched = ranks.match(checkpoint, take_apart, wishes, all_roles)
    live = made[0]

    with ranks.source(checkpoint, lambda: reads_of(checkpoint, matched.fills)) as source:

        def check() -> None:
            if damages := source.check():
                raise first_damage(damages, checkpoint.store.url, checkpoint.step)

        if stage:
            ranks.all_done(CHECK, check)
        rates, hyper = keep_live_rates(state, matched), tensor_hyper_parameters(matched)

        def give() -> None:
            put(matched, live)
            rates()
            hyper()
            for bring_up_to_date in live.after:
                bring_up_to_date(set(matched.ledger.filled))

        state.touched = f"loading step {checkpoint.step} of {checkpoint.store.url} did not finish"
        try:
            ranks.all_done(FILL, lambda: fill_from(source, checkpoint, matched.fills))
            matched.ledger.read_bytes = source.read_bytes
            ranks.all_done(PUT, give)
        except HoldfastError as error:
            state.touched = f"loading step {checkpoint.step} of {checkpoint.store.url} failed: {error}"
            raise
    state.touched = None
    return matched.ledger
