-- The rollouts of an experiment on one task: base and students (held out), and its teachers (rollout sets), in that
-- order; at most `count` of each role and decoding.
WITH numbered AS (
    SELECT
        r.rollout_id,
        r.origin,
        coalesce(r.rollout_set, r.experiment) AS made_for,
        coalesce(r.checkpoint_role, 'teacher') AS side,
        r.decoding,
        r.seed,
        r.sample,
        r.teacher,
        r.exit_status,
        coalesce(s.verdict, r.outcome ->> '$.verdict', 'unknown') AS verdict,
        s.reward,
        row_number() OVER (
            PARTITION BY coalesce(r.checkpoint_role, 'teacher'), r.decoding ORDER BY r.seed, r.sample_seed, r.sample
        ) AS place
    FROM rollouts AS r
    LEFT JOIN scores AS s
        ON r.rollout_id = s.rollout_id AND r.origin = s.origin AND r.made_for = s.made_for
    WHERE
        r.task_id = getvariable('task')
        AND (
            (r.origin = 'eval' AND r.experiment = getvariable('experiment'))
            OR (
                r.origin = 'set'
                AND list_contains(
                    (
                        SELECT e.rollout_sets FROM experiments AS e
                        WHERE e.experiment = getvariable('experiment')
                    ),
                    r.rollout_set
                )
            )
        )
)

SELECT *
FROM numbered
WHERE place <= getvariable('count')
ORDER BY list_position(['base', 'sft', 'rl', 'teacher'], side) ASC, decoding ASC, place ASC;
