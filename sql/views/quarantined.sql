-- One row per rejected input of a suite or rollout set, or task that evaluation or reinforcement could not prove.
CREATE OR REPLACE VIEW quarantined AS
SELECT * FROM tasks.quarantined
UNION ALL BY NAME
SELECT * FROM raw_rollouts.quarantined
UNION ALL BY NAME
SELECT * FROM eval_rollouts.quarantined
UNION ALL BY NAME
SELECT * FROM rl_checkpoint.quarantined;
