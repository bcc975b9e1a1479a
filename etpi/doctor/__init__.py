"""`etpi doctor`: prove, before anything is run, that this machine has what steps need.

`machine` examines it, `findings` turns the report into faults with remedies and prints them, `command` is the command.
"""
