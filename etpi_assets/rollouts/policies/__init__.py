"""Scripted policies: what an agent without a model writes, one module a suite family or purpose."""
