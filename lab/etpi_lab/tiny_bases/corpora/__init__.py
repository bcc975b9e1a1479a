"""The training corpora of the tiny bases: conversations of scripted agents, and exercises, a module for each world."""
