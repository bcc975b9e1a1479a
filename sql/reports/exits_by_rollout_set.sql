-- How do rollouts end, set by set and model by model? Exits stand apart from verdicts.
WITH counted AS (
    SELECT
        r.origin,
        coalesce(r.rollout_set, r.experiment) AS made_for,
        coalesce(r.checkpoint_role, r.teacher) AS model,
        r.decoding,
        r.exit_status,
        count(*) AS n,
        count(s.reward) AS n_judged,
        avg(s.reward) AS mean_reward,
        count(r.error) AS infrastructure_errors
    FROM rollouts AS r
    LEFT JOIN scores AS s
        ON
            r.rollout_id = s.rollout_id
            AND r.origin = s.origin
            AND coalesce(r.rollout_set, r.experiment) = coalesce(s.rollout_set, s.experiment)
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
