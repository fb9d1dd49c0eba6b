"""A run as a whole: attempts, lineage, writing and deciding a step, references, pins, pruning, copying. No torch."""
