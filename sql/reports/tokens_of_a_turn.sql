-- Which tokens exactly did the model read and write in a turn? With the log-probability that an id was sampled with; of
-- turns that reinforcement trained on also the trainer's, its entropy there, and the importance ratio of the two.
-- SET VARIABLE rollout = 'rollout_id'; SET VARIABLE agent = 'agent1'; SET VARIABLE turn = 0;
-- SET VARIABLE tokenizer = 'tiny' if the specs do not name it. The default is the first captured turn 0.
-- DuckDB treats a variable as a constant, so the views below read only this rollout's ids; with a subquery they would
-- read all.
SET VARIABLE asked = coalesce(
    getvariable('rollout'),
    (
        SELECT t.rollout_id FROM turns AS t
        WHERE t.capture != 'none'
        ORDER BY t.origin DESC, t.rollout_id ASC
        LIMIT 1
    )
);

WITH chosen AS (
    SELECT
        f.rollout_id,
        f.agent_id,
        f.turn,
        f.prompt_ids,
        f.output_ids,
        f.logprobs,
        r.policy_logprobs,
        r.entropies,
        coalesce(getvariable('tokenizer'), s.tokenizer, e.spec ->> '$.base.tokenizer') AS tokenizer
    FROM full_turns AS f
    LEFT JOIN rollout_sets AS s ON f.rollout_set = s.rollout_set
    LEFT JOIN experiments AS e ON f.experiment = e.experiment
    LEFT JOIN rl_turns AS r
        ON
            f.origin = 'rl'
            AND f.experiment = r.experiment
            AND f.rollout_id = r.rollout_id
            AND f.agent_id = r.agent_id
            AND f.turn = r.turn
            AND r.rollout_id = getvariable('asked')
    WHERE
        f.turn = coalesce(getvariable('turn'), 0)
        AND f.rollout_id = getvariable('asked')
        AND (getvariable('agent') IS NULL OR f.agent_id = getvariable('agent'))
    ORDER BY f.agent_id
    LIMIT 1
),

tokens AS (
    SELECT
        rollout_id,
        agent_id,
        turn,
        tokenizer,
        'prompt' AS side,
        unnest(prompt_ids) AS token_id,
        NULL::FLOAT AS logprob,
        NULL::FLOAT AS policy_logprob,
        NULL::FLOAT AS entropy,
        generate_subscripts(prompt_ids, 1) AS place
    FROM chosen
    UNION ALL BY NAME
    SELECT
        rollout_id,
        agent_id,
        turn,
        tokenizer,
        'output' AS side,
        unnest(output_ids) AS token_id,
        unnest(logprobs) AS logprob,
        unnest(policy_logprobs) AS policy_logprob,
        unnest(entropies) AS entropy,
        generate_subscripts(output_ids, 1) AS place
    FROM chosen
)

SELECT
    t.rollout_id,
    t.agent_id,
    t.turn,
    t.side,
    t.place - 1 AS place,
    t.token_id,
    v.text,
    t.logprob,
    t.policy_logprob,
    t.entropy,
    exp(t.policy_logprob - t.logprob) AS ratio
FROM tokens AS t
LEFT JOIN vocabulary AS v ON t.tokenizer = v.tokenizer AND t.token_id = v.id
ORDER BY t.side DESC, t.place ASC;
