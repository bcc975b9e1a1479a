-- One row a headline metric of an experiment, pooled over seeds.
CREATE OR REPLACE VIEW leaderboard AS
SELECT * FROM leaderboard.leaderboard;
