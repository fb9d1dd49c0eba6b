"""Ends the pools of ranks with the session."""

from ranks.fixture import no_ranks_left  # noqa: F401
