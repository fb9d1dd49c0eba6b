"""The demo: train small transformers, kill them again and again, and show that nothing was lost and nothing changed.

show      what `holdfast demo` runs: the trainings, the comparisons, the picture
hops      several ranks, under one layout after another; what follows is one process, and what both parts share
drive     starts the training processes and kills them
job       a command and all processes that come of it
train     the training process: an ordinary program with a Checkpointer
model     a transformer; data: text to train on, with a position that resumes
journal   what a training process wrote about itself
verdict   the comparison, bit by bit
plot      the picture; report: the lines on the terminal
"""

from holdfast.demo.show import main, run_demo

__all__ = ["main", "run_demo"]
