"""`etpi init`: writes the specs of a user's own data, tasks or endpoint, after a look at them.

`trajectories` looks at recorded runs, `endpoint` at a server, `student` at the model to train; `write` writes, checks
and announces specs.
"""
