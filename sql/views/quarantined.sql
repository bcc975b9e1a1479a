-- One row an input that was not taken, and why: of a suite or of a rollout set.
CREATE OR REPLACE VIEW quarantined AS
SELECT * FROM tasks.quarantined
UNION ALL BY NAME
SELECT * FROM raw_rollouts.quarantined;
