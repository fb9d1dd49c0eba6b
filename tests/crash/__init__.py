"""Crash tests: recorded system calls replayed to every crash state, real kills, real power cuts."""
