"""`etpi doctor`: prove, before anything is run, that steps will work on this machine.

`machine` examines it, `findings` turns the report into faults with remedies and prints them, `command` is the command.
"""
