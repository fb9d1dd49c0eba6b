"""The benchmark: holdfast beside the libraries people use today, on one state, in one run, on one disk.

Run it with `python -m bench` from the root of the repository (see `bench/README.md`). Reader's map: `__main__` is the
command, `drive` asks each method in turn, `worker` is the process in which one method lives, `methods` has a class for
each, `state` is what they save, `disk` what the disk itself can do, `measure` the instruments, `report` and `plot` what
comes out.
"""
