"""The local store is a store, with direct I/O and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.store.local import LocalStore
from holdfast.testing.conformance import StoreSuite


class TestLocalStore(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path / "not made yet" / "root")


class TestLocalStoreWithoutDirectWrites(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path / "root", direct=False)
