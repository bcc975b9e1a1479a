"""A proxy that records the calls of unmodified agent harnesses, token for token (docs/any_agent.md).

A harness speaks one of the `dialects` of hosted models. The `server` turns its requests into prompts of token ids
(`conversation`), sends these to an engine, and writes each call to the attempt's log (`store`) before it answers.
"""
