"""The agent: the process of a node that owns the snapshots' memory and does all writing; its engine also runs in a thread."""
