"""Capturing state without stopping training: what is copied at once, what in the background, and the barrier between."""
