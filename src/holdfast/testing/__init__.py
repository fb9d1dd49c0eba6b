"""For testing what stands on holdfast: a suite that every store must pass, stores that fail or stop where told, a clock.

Nothing here is used by holdfast itself. `conformance` needs pytest; the others need only Python.
"""
