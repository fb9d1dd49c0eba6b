"""Where bytes go: one small interface, stores that have it, and wrappers with the same interface around them."""
