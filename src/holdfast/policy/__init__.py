"""When to save and what to keep: pure functions of what is known."""
