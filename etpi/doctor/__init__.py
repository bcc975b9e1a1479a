"""`etpi doctor`: prove, before anything is run, that steps will work on this machine.

`machine` examines it; `command` turns the report into faults with remedies, and prints them.
"""
