"""Rehearse an experiment: the same graph, assets and checks on a machine without a GPU, in a separate lake.

`shrink` writes the small specs; `students` and `stand_ins` create the models and data that this machine lacks;
`teacher` serves reference solutions; `stages` runs the chain (`chain`, in a separate process) and judges each asset;
`costs` estimates the real run; `record` does all of it and keeps the result; `page` is its text.
"""

RATE = 3.0
"""US dollars for an hour of a GPU."""
