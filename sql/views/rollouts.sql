-- One row a rollout: origin is set (a rollout set), eval or rl; made_for the set or experiment; model who spoke.
CREATE OR REPLACE VIEW rollouts AS
SELECT
    *,
    coalesce(rollout_set, experiment) AS made_for,
    coalesce(checkpoint_role, teacher) AS model
FROM (
    SELECT * FROM raw_rollouts.rollouts
    UNION ALL BY NAME
    SELECT * FROM eval_rollouts.rollouts
    UNION ALL BY NAME
    SELECT * FROM rl_checkpoint.rollouts
) AS made;
