-- How do rollouts end, by rollout set and model? Exit statuses are separate from verdicts.
WITH counted AS (
    SELECT
        r.origin,
        r.made_for,
        r.model,
        r.decoding,
        r.exit_status,
        count(*) AS n,
        count(s.reward) AS n_judged,
        avg(s.reward) AS mean_reward,
        count(r.error) AS infrastructure_errors
    FROM rollouts AS r
    LEFT JOIN scores AS s
        ON r.rollout_id = s.rollout_id AND r.origin = s.origin AND r.made_for = s.made_for
    GROUP BY ALL
)

SELECT
    origin,
    made_for,
    model,
    decoding,
    exit_status,
    n,
    n / sum(n) OVER (PARTITION BY origin, made_for, model, decoding) AS share,
    n_judged,
    mean_reward,
    infrastructure_errors
FROM counted
ORDER BY origin DESC, made_for ASC, model ASC, decoding ASC, n DESC;
