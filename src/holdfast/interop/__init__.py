"""Other people's checkpoints: reading them as if they were ours, and writing them."""
