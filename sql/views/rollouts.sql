-- One row per rollout. origin is 'set' (a rollout set), 'eval' or 'rl'; made_for is the rollout set or experiment;
-- model is the checkpoint role or the teacher.
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
