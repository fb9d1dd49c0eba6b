"""Ends the pools with the session."""

from .fixture import no_ranks_left  # noqa: F401
