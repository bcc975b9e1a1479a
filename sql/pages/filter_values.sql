-- The values that rollouts have in each column that the list can be filtered by, most frequent first.
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
),

counted AS (
    SELECT
        *,
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
GROUP BY name, value
ORDER BY name ASC, n DESC, value ASC;
