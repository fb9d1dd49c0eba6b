"""The second part of the demo: one training that is killed and goes on under another layout, again and again.

layout    the layouts, and the sizes that they share
model     a small Llama, and how torch spreads it over ranks
train     the training program, run by torchrun
drive     starts the program under one layout after the other, and kills all ranks
stored    what a step holds: digests that do not depend on the layout
verdict   the comparison: states bit by bit, samples in order, losses within a tolerance
words     a hop and a loss curve in a few lines
"""
