"""Rehearse an experiment: the same graph, assets and checks on a machine without a GPU, in a separate lake.

`shrink` writes the small specs, with models of `students`; `stages` runs the chain and judges each asset; `costs` and
`memory` estimate the real run; `starts` says what proves that it would start; `record` does all of it, keeps the
result and prints it.
"""

RATE = 3.0
"""US dollars for an hour of a GPU."""
