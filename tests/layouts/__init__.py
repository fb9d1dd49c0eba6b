"""The layout matrix: one small model under every parallel layout, saved under each and loaded under each other."""
