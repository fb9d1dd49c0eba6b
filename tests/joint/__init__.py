"""Several ranks that save and load together, and what goes wrong then: conflicts, ranks that stop, stores that fail, kills."""
