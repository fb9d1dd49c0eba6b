"""The demo: train a small transformer, kill it again and again, and show that nothing was lost and nothing changed.

show      what `holdfast demo` runs: both trainings, the comparison, the picture
drive     starts the training processes and kills them
train     the training process: an ordinary program with a Checkpointer
model     a transformer; data: text to train on, with a position that resumes
journal   what a training process wrote about itself
verdict   the comparison, bit by bit
plot      the picture; report: the lines on the terminal
"""

from holdfast.demo.show import main, run_demo

__all__ = ["main", "run_demo"]
