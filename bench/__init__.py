"""The benchmark: holdfast beside the libraries people use today, on one state, in one run, on one disk.

Run it with `python -m bench`, or `python -m bench.ranks` for two ranks, from the root of the repository (see
`bench/README.md`). Reader's map: `command` is what both do, `drive` asks each method in turn, `worker` is the process in
which one method lives, `channel` how they talk, `methods` has a class for each, `shards` one for each of several ranks,
`state` is what they save, `disk` what the disk itself can do, `measure` the instruments, `report` and `plot` what comes out.
"""
