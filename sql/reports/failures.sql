-- Which rollouts of the evaluation did not solve their task, and why?
-- SET VARIABLE experiment = 'name' for one experiment. infrastructure is true for rollouts that failed outside the
-- model; rates exclude them. reason is the judge's own, where it gives one; details is all that it said, as JSON.
WITH failed AS (
    SELECT
        r.experiment,
        r.checkpoint_role,
        r.seed,
        r.decoding,
        r.task_id,
        r.repo,
        r.sample,
        r.rollout_id,
        coalesce(s.infrastructure_error, FALSE) AS infrastructure,
        coalesce(s.verdict, 'unknown') AS verdict,
        r.exit_status,
        s.reward,
        s.turns,
        s.output_tokens,
        r.error,
        r.outcome -> '$.details' AS details,
        list_position(['base', 'sft', 'rl'], r.checkpoint_role) AS place
    FROM rollouts AS r
    LEFT JOIN scores AS s ON r.experiment = s.experiment AND r.rollout_id = s.rollout_id AND s.origin = 'eval'
    WHERE
        r.origin = 'eval'
        AND s.reward IS DISTINCT FROM 1
        AND (getvariable('experiment') IS NULL OR r.experiment = getvariable('experiment'))
)

SELECT
    experiment,
    checkpoint_role,
    seed,
    decoding,
    task_id,
    repo,
    sample,
    rollout_id,
    infrastructure,
    verdict,
    exit_status,
    coalesce(
        error,
        details ->> '$.why',
        details ->> '$.not_believed',
        'wrong: ' || (details ->> '$.wrong'),
        'conflict: ' || (details ->> '$.conflict'),
        'failed: ' || list_aggregate(
            list_filter(json_keys(details -> '$.features'), LAMBDA f: details -> '$.features' ->> f = 'false'),
            'string_agg',
            ', '
        )
    ) AS reason,
    reward,
    turns,
    output_tokens,
    details::VARCHAR AS details
FROM failed
ORDER BY experiment ASC, place DESC, decoding ASC, seed ASC NULLS FIRST, task_id ASC, sample ASC, rollout_id ASC;
