-- One row per rejected input of a suite or rollout set, with the reason.
CREATE OR REPLACE VIEW quarantined AS
SELECT * FROM tasks.quarantined
UNION ALL BY NAME
SELECT * FROM raw_rollouts.quarantined;
