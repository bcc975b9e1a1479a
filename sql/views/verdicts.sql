-- One row per verdict on a rollout: the recorded one, and those of later judges on its stored work.
-- origin and made_for are as in rollouts; number counts a rollout's verdicts from 0, and the last one counts.
CREATE OR REPLACE VIEW verdicts AS
SELECT
    *,
    coalesce(rollout_set, experiment) AS made_for,
    row_number() OVER (
        PARTITION BY origin, coalesce(rollout_set, experiment), rollout_id
        ORDER BY judged_at NULLS FIRST
    ) - 1 AS number
FROM (
    SELECT
        *,
        'set' AS origin
    FROM scored_rollouts.verdicts
    UNION ALL BY NAME
    SELECT
        *,
        'eval' AS origin
    FROM eval_metrics.verdicts
    UNION ALL BY NAME
    SELECT
        *,
        'rl' AS origin
    FROM rl_rewards.verdicts
) AS given;
