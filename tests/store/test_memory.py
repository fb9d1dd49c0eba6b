"""The memory store is a store."""

from __future__ import annotations

import pytest

from holdfast.store.locate import open_store
from holdfast.store.memory import MemoryStore
from holdfast.testing.conformance import StoreSuite


class TestMemoryStore(StoreSuite):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()


def test_a_named_memory_store_is_the_same_for_all_who_ask() -> None:
    open_store("memory://shared").create("file", b"content")
    assert open_store("memory://shared").read("file") == b"content"
    assert open_store("memory://other").list("") == []
