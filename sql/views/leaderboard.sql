-- One row per headline metric of an experiment, pooled over seeds. Figures that others published have checkpoint_role
-- 'published', with a Wilson interval if they gave counts.
CREATE OR REPLACE VIEW leaderboard AS
WITH stated AS (
    SELECT
        name,
        title,
        spec -> '$.published' AS published,
        unnest(json_keys(spec -> '$.published')) AS metric
    FROM experiment_spec.specs
),

figures AS (
    SELECT
        name,
        title,
        metric,
        try_cast(coalesce((published -> metric) ->> 'value', published ->> metric) AS DOUBLE) AS value,
        try_cast((published -> metric) ->> 'hits' AS DOUBLE) AS hits,
        try_cast((published -> metric) ->> 'n' AS INTEGER) AS n
    FROM stated
),

counted AS (
    SELECT
        *,
        hits / nullif(n, 0) AS p,
        1.959964 AS z
    FROM figures
    WHERE value IS NOT NULL
)

SELECT * FROM leaderboard.leaderboard
UNION ALL BY NAME
SELECT
    name AS experiment,
    title,
    'published' AS checkpoint_role,
    'published' AS decoding,
    metric,
    value,
    n,
    (p + z * z / (2 * n) - z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))) / (1 + z * z / n) AS ci_low,
    (p + z * z / (2 * n) + z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))) / (1 + z * z / n) AS ci_high,
    NULL AS seeds
FROM counted;
