"""`etpi doctor`: prove, before anything is run, that a machine or every node of a cluster has what steps need.

`node` examines one machine, `survey` every node of a cluster and each pair of nodes, `verdict` turns the reports
into faults with remedies, `command` prints them.
"""
