"""The agent: its loop, prompts, tools, and the actions and messages read from its turns."""
