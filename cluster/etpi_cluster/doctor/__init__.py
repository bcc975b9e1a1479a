"""`etpi cluster doctor`: prove, before anything is run, that every node of a cluster has what steps need.

`node` examines one node, `survey` every node and each pair of nodes, `verdict` turns the reports into faults with
remedies, `command` prints them.
"""
