"""Reading from an agent's memory: what it gives wrong, the store gives right."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from holdfast.agent.recall import Remembering, _File
from holdfast.store.local import LocalStore


def test_what_is_asked_for_again_comes_from_the_store(tmp_path: Path) -> None:
    """Whoever checks digests reads damaged bytes once more: a rank may hold other bytes of a replica than were written."""
    stored, held = np.arange(100, dtype=np.uint8), np.full(40, 7, np.uint8)
    (tmp_path / "data").write_bytes(stored.tobytes())
    store = Remembering(LocalStore(tmp_path), {"data": _File([30], [held])})
    reader, out = store.open("data"), np.zeros(20, np.uint8)
    try:
        for start, wanted in ((30, held[:20]), (30, stored[30:50]), (50, held[20:]), (52, stored[52:60]), (0, stored[:20])):
            target = out[: len(wanted)]
            assert reader.read_into(start, [target.data]) == len(wanted)
            assert target.tolist() == wanted.tolist(), start
    finally:
        reader.close()
    assert store.read_bytes == 40
