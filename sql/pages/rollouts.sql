-- A page of the rollouts that the filters leave, with their scores and the number of all that match. Filters are
-- variables: made_for, origin, experiment, role, decoding, seed, task, repo, verdict, exit, reason (part of the text),
-- min_reward, ids (rollouts that a search of texts returned). sort: newest, task, reward, tokens, turns, seconds.
-- first and count: the page.
WITH matching AS (
    SELECT
        r.rollout_id,
        r.origin,
        coalesce(r.rollout_set, r.experiment) AS made_for,
        r.checkpoint_role,
        r.decoding,
        r.seed,
        r.teacher,
        r.task_id,
        r.repo,
        r.sample,
        r.exit_status,
        r.started_at,
        r.wall_seconds,
        coalesce(s.verdict, r.outcome ->> '$.verdict', 'unknown') AS verdict,
        coalesce(s.reward, try_cast(r.outcome ->> '$.reward' AS DOUBLE)) AS reward,
        s.plan_first,
        s.output_tokens,
        s.turns,
        coalesce(s.plan_first_reason, s.plan_content_reason, r.error) AS reason
    FROM rollouts AS r
    LEFT JOIN scores AS s
        ON r.rollout_id = s.rollout_id AND r.origin = s.origin AND r.made_for = s.made_for
    WHERE
        (getvariable('made_for') IS NULL OR coalesce(r.rollout_set, r.experiment) = getvariable('made_for'))
        AND (getvariable('origin') IS NULL OR r.origin = getvariable('origin'))
        AND (getvariable('experiment') IS NULL OR r.experiment = getvariable('experiment'))
        AND (getvariable('role') IS NULL OR r.checkpoint_role = getvariable('role'))
        AND (getvariable('decoding') IS NULL OR r.decoding = getvariable('decoding'))
        AND (getvariable('seed') IS NULL OR r.seed = getvariable('seed'))
        AND (getvariable('task') IS NULL OR r.task_id = getvariable('task'))
        AND (getvariable('repo') IS NULL OR r.repo = getvariable('repo'))
        AND (getvariable('exit') IS NULL OR r.exit_status = getvariable('exit'))
        AND (
            getvariable('ids') IS NULL
            OR r.rollout_id IN (SELECT unnest(getvariable('ids')::VARCHAR[]))
        )
),

chosen AS MATERIALIZED (
    SELECT *
    FROM matching
    WHERE
        (getvariable('verdict') IS NULL OR verdict = getvariable('verdict'))
        AND (getvariable('min_reward') IS NULL OR reward >= getvariable('min_reward'))
        AND (getvariable('reason') IS NULL OR contains(lower(reason), lower(getvariable('reason')::VARCHAR)))
)

SELECT
    *,
    (SELECT count(c.rollout_id) FROM chosen AS c) AS matches
FROM chosen
ORDER BY
    CASE WHEN getvariable('sort') = 'task' THEN task_id END ASC,
    CASE
    getvariable('sort')
        WHEN 'reward' THEN reward
        WHEN 'tokens' THEN output_tokens
        WHEN 'turns' THEN turns
        WHEN 'seconds' THEN wall_seconds
    END DESC NULLS LAST,
    started_at DESC NULLS LAST,
    rollout_id ASC
LIMIT getvariable('count') OFFSET getvariable('first');
