"""Embedded worlds: small suites that run on a CPU.

A package for each world: its tasks, judge, scripted policy, prompts and the conversations of its tiny base.
"""
