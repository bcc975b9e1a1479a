"""Embedded worlds: small suites that run on a CPU.

A package for each world: its tasks, judge, scripted policy and prompts.
"""
