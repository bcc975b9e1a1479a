"""Suites: one module a family, each making tasks and judging what agents leave."""
