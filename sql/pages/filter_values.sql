-- The values that each column of the list can be filtered by, most frequent first, among the rollouts that the filters
-- of the other columns leave. Variables: those of `rollouts.sql`, but for ids and the page.
WITH judged AS (
    SELECT
        r.origin,
        coalesce(r.rollout_set, r.experiment) AS made_for,
        r.experiment,
        r.checkpoint_role AS role,
        r.decoding,
        r.repo,
        r.exit_status AS exit,
        coalesce(s.verdict, r.outcome ->> '$.verdict', 'unknown') AS verdict
    FROM rollouts AS r
    LEFT JOIN scores AS s
        ON r.rollout_id = s.rollout_id AND r.origin = s.origin AND r.made_for = s.made_for
    WHERE
        (getvariable('task') IS NULL OR r.task_id = getvariable('task'))
        AND (getvariable('seed') IS NULL OR r.seed = getvariable('seed'))
        AND (
            getvariable('min_reward') IS NULL
            OR coalesce(s.reward, try_cast(r.outcome ->> '$.reward' AS DOUBLE)) >= getvariable('min_reward')
        )
        AND (
            getvariable('reason') IS NULL
            OR contains(
                lower(coalesce(s.plan_first_reason, s.plan_content_reason, r.error)),
                lower(getvariable('reason')::VARCHAR)
            )
        )
),

counted AS (
    SELECT
        *,
        -- The columns whose filter a rollout does not meet.
        list_filter(
            [
                CASE WHEN made_for IS DISTINCT FROM coalesce(getvariable('made_for'), made_for) THEN 'made_for' END,
                CASE WHEN origin IS DISTINCT FROM coalesce(getvariable('origin'), origin) THEN 'origin' END,
                CASE
                    WHEN experiment IS DISTINCT FROM coalesce(getvariable('experiment'), experiment) THEN 'experiment'
                END,
                CASE WHEN role IS DISTINCT FROM coalesce(getvariable('role'), role) THEN 'role' END,
                CASE WHEN decoding IS DISTINCT FROM coalesce(getvariable('decoding'), decoding) THEN 'decoding' END,
                CASE WHEN repo IS DISTINCT FROM coalesce(getvariable('repo'), repo) THEN 'repo' END,
                CASE WHEN exit IS DISTINCT FROM coalesce(getvariable('exit'), exit) THEN 'exit' END,
                CASE WHEN verdict IS DISTINCT FROM coalesce(getvariable('verdict'), verdict) THEN 'verdict' END
            ],
            LAMBDA x: x IS NOT NULL
        ) AS missed,
        count(*) AS n
    FROM judged
    GROUP BY ALL
),

long AS (
    UNPIVOT counted ON made_for, origin, experiment, role, decoding, repo, exit, verdict
    INTO NAME name VALUE value
)

SELECT
    name,
    value,
    sum(n)::BIGINT AS n
FROM long
WHERE missed = [] OR missed = [name]
GROUP BY name, value
ORDER BY name ASC, n DESC, value ASC;
