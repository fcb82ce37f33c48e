"""A random-program verifier: programs of any shape, processes that die, the laws they must keep.

`language` describes programs, `generator` draws them, `interpreter` runs one as a workflow and logs
what it saw. `simulation` runs a program in simulated time on a faulty store in memory, `cluster`
runs many of them in worker processes that a nemesis kills, pauses and cuts off. `checker` reads the
log and names each law that was broken; `shrinker` makes the program that broke it small.
"""
