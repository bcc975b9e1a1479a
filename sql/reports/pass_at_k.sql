-- How often does one rollout of a task succeed, and how often at least one of K, by rollout set and evaluation?
-- SET VARIABLE rollout_set = 'name' or experiment = 'name' for one of them. K is the smallest number of rollouts of any
-- task. With c of n rollouts right, pass@K = 1 - C(n - c, K) / C(n, K), the unbiased estimate of Chen et al. 2021,
-- averaged over tasks.
WITH judged AS (
    SELECT
        r.origin,
        r.made_for,
        r.model,
        coalesce(r.decoding, 'as_rolled_out') AS decoding,
        r.task_id,
        count(*) AS n,
        count_if(s.reward = 1)::BIGINT AS c
    FROM rollouts AS r
    INNER JOIN scores AS s
        ON r.rollout_id = s.rollout_id AND r.origin = s.origin AND r.made_for = s.made_for
    WHERE
        s.reward IS NOT NULL
        AND NOT s.infrastructure_error
        AND (getvariable('rollout_set') IS NULL OR r.rollout_set = getvariable('rollout_set'))
        AND (getvariable('experiment') IS NULL OR r.experiment = getvariable('experiment'))
    GROUP BY ALL
),

counted AS (
    SELECT
        *,
        min(n) OVER (PARTITION BY origin, made_for, model, decoding) AS k
    FROM judged
)

SELECT
    origin,
    made_for,
    model,
    decoding,
    k,
    count(*) AS tasks,
    sum(n)::BIGINT AS rollouts,
    avg(c / n) AS pass_at_1,
    avg(
        CASE
            WHEN n - c < k THEN 1
            ELSE
                1 - exp(lgamma(n - c + 1) + lgamma(n - k + 1) - lgamma(n - c - k + 1) - lgamma(n + 1))
        END
    ) AS pass_at_k
FROM counted
GROUP BY ALL
ORDER BY origin DESC, made_for ASC, model ASC, decoding ASC;
