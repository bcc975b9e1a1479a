-- One row per assistant turn as stored: its prompt holds only what it adds to an earlier turn. full_turns has whole
-- prompts.
CREATE OR REPLACE VIEW turns AS
SELECT
    *,
    coalesce(rollout_set, experiment) AS made_for
FROM (
    SELECT
        *,
        'set' AS origin
    FROM raw_rollouts.turns
    UNION ALL BY NAME
    SELECT
        *,
        'eval' AS origin
    FROM eval_rollouts.turns
    UNION ALL BY NAME
    SELECT
        *,
        'rl' AS origin
    FROM rl_checkpoint.turns
) AS made;
