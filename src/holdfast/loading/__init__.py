"""Reading a checkpoint: opening it, matching it with what is live, filling, and the account of all that."""
