"""What is missing, stale or of changed code, and why: the planner, code versions, and what they tell a person."""
