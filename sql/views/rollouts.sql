-- One row a rollout, whatever it was made for: origin is set (a rollout set), eval or rl.
CREATE OR REPLACE VIEW rollouts AS
SELECT * FROM raw_rollouts.rollouts
UNION ALL BY NAME
SELECT * FROM eval_rollouts.rollouts
UNION ALL BY NAME
SELECT * FROM rl_checkpoint.rollouts;
