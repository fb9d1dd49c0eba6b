"""The agent: the process of a node that owns the snapshots' memory and does all writing; and the engine that a thread shares."""
