-- What did each experiment cost: collecting its rollouts, its training tokens, training, and evaluation?
-- Rollout sets are shared, so each experiment that selects from a set is charged the set's full cost.
WITH per_rollout AS (
    SELECT
        r.origin,
        r.made_for,
        r.rollout_id,
        any_value(r.wall_seconds) AS wall_seconds,
        sum(t.prompt_tokens)::BIGINT AS prompt_tokens,
        sum(t.output_tokens)::BIGINT AS output_tokens
    FROM rollouts AS r
    LEFT JOIN turns AS t
        ON r.rollout_id = t.rollout_id AND r.origin = t.origin AND r.made_for = t.made_for
    GROUP BY ALL
),

per_part AS (
    SELECT
        origin,
        made_for,
        count(*) AS n_rollouts,
        sum(wall_seconds) AS seconds,
        sum(prompt_tokens)::BIGINT AS prompt_tokens,
        sum(output_tokens)::BIGINT AS output_tokens
    FROM per_rollout
    GROUP BY origin, made_for
),

drawn AS (
    SELECT
        experiment,
        unnest(rollout_sets) AS made_for
    FROM experiments
),

collected AS (
    SELECT
        d.experiment,
        sum(p.n_rollouts)::BIGINT AS n_rollouts,
        sum(p.seconds) AS seconds,
        sum(p.prompt_tokens)::BIGINT AS prompt_tokens,
        sum(p.output_tokens)::BIGINT AS output_tokens
    FROM drawn AS d
    INNER JOIN per_part AS p ON d.made_for = p.made_for AND p.origin = 'set'
    GROUP BY d.experiment
),

chosen AS (
    SELECT
        experiment,
        count(*) AS n_rows,
        sum(output_tokens)::BIGINT AS label_tokens
    FROM dataset_rows
    WHERE split = 'train'
    GROUP BY experiment
),

trained AS (
    SELECT
        experiment,
        count(*) AS n_checkpoints,
        sum(wall_seconds) AS seconds
    FROM checkpoints
    WHERE role IN ('sft', 'rl') AND final
    GROUP BY experiment
)

SELECT
    e.experiment,
    e.title,
    c.n_rollouts AS rollouts,
    c.seconds AS rollout_seconds,
    c.prompt_tokens AS rollout_prompt_tokens,
    c.output_tokens AS rollout_output_tokens,
    d.n_rows AS training_rows,
    d.label_tokens,
    t.n_checkpoints AS checkpoints,
    t.seconds AS training_seconds,
    v.n_rollouts AS eval_rollouts,
    v.seconds AS eval_seconds,
    v.prompt_tokens AS eval_prompt_tokens,
    v.output_tokens AS eval_output_tokens
FROM experiments AS e
LEFT JOIN collected AS c ON e.experiment = c.experiment
LEFT JOIN chosen AS d ON e.experiment = d.experiment
LEFT JOIN trained AS t ON e.experiment = t.experiment
LEFT JOIN per_part AS v ON e.experiment = v.made_for AND v.origin = 'eval'
ORDER BY e.experiment;
