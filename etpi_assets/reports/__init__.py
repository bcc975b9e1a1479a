"""Reports, model cards, the leaderboard and the pages of results, for people."""
