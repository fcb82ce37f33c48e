"""A verifier with random programs: their processes crash, and the laws must hold.

`language` describes programs, `generator` generates them, `interpreter` runs one as a workflow and
logs what it saw. `simulation` runs a program in simulated time on a faulty store in memory,
`cluster` runs many of them in worker processes that a nemesis kills, pauses and disconnects.
`checker` reads the log and reports each law that was violated; `shrinker` reduces the program that
violated it.
"""
