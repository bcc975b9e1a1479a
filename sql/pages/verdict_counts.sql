-- How many rollouts have which verdict, by the set or experiment that they were made for, role, decoding and seed.
SELECT
    r.origin,
    coalesce(r.rollout_set, r.experiment) AS made_for,
    r.checkpoint_role,
    r.decoding,
    any_value(r.teacher) FILTER (r.origin = 'set') AS teacher,
    any_value(r.suite) AS suite,
    coalesce(s.verdict, r.outcome ->> '$.verdict', 'unknown') AS verdict,
    count(*) AS n
FROM rollouts AS r
LEFT JOIN scores AS s
    ON r.rollout_id = s.rollout_id AND r.origin = s.origin AND r.made_for = s.made_for
WHERE
    getvariable('experiment') IS NULL
    OR (r.experiment = getvariable('experiment') AND r.origin IN ('eval', 'rl'))
    OR (
        r.origin = 'set'
        AND list_contains(
            (
                SELECT e.rollout_sets FROM experiments AS e
                WHERE e.experiment = getvariable('experiment')
            ), r.rollout_set
        )
    )
GROUP BY ALL
ORDER BY ALL;
