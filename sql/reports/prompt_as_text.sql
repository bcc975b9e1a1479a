-- What does a turn's whole prompt say, as the model read it and as the student is trained on it?
-- SET VARIABLE rollout = 'rollout_id'; SET VARIABLE agent = 'agent1'; SET VARIABLE turn = 0;
-- SET VARIABLE tokenizer = 'tiny' if the specs do not name it. The default is the first captured turn 0 of a rollout
-- set. One row as captured (form = 'captured'), and one for each experiment that trains on the turn (form = 'trained':
-- without steering and removed thoughts). A character whose bytes are in several tokens reads as U+FFFD.
SET VARIABLE asked = coalesce(
    getvariable('rollout'),
    (
        SELECT t.rollout_id FROM turns AS t
        WHERE t.capture != 'none'
        ORDER BY t.origin DESC, t.rollout_id ASC
        LIMIT 1
    )
);

WITH forms AS (
    SELECT
        'captured' AS form,
        f.made_for,
        f.rollout_id,
        f.agent_id,
        f.turn,
        f.prompt_ids,
        f.output_ids,
        coalesce(getvariable('tokenizer'), s.tokenizer, e.spec ->> '$.base.tokenizer') AS tokenizer
    FROM full_turns AS f
    LEFT JOIN rollout_sets AS s ON f.rollout_set = s.rollout_set
    LEFT JOIN experiments AS e ON f.experiment = e.experiment
    WHERE f.rollout_id = getvariable('asked') AND f.turn = coalesce(getvariable('turn'), 0)
    UNION ALL BY NAME
    SELECT
        'trained' AS form,
        p.experiment AS made_for,
        p.rollout_id,
        p.agent_id,
        p.turn,
        p.input_ids AS prompt_ids,
        p.output_ids,
        coalesce(getvariable('tokenizer'), e.spec ->> '$.base.tokenizer') AS tokenizer
    FROM tito_pairs AS p
    LEFT JOIN experiments AS e ON p.experiment = e.experiment
    WHERE p.rollout_id = getvariable('asked') AND p.turn = coalesce(getvariable('turn'), 0)
),

chosen AS (
    SELECT
        *,
        row_number() OVER (ORDER BY form, made_for, agent_id) AS number
    FROM forms
    WHERE prompt_ids IS NOT NULL AND agent_id = coalesce(getvariable('agent'), (SELECT min(f.agent_id) FROM forms AS f))
),

tokens AS (
    SELECT
        number,
        tokenizer,
        'prompt' AS side,
        unnest(prompt_ids) AS token_id,
        generate_subscripts(prompt_ids, 1) AS place
    FROM chosen
    UNION ALL BY NAME
    SELECT
        number,
        tokenizer,
        'output' AS side,
        unnest(output_ids) AS token_id,
        generate_subscripts(output_ids, 1) AS place
    FROM chosen
),

texts AS (
    SELECT
        t.number,
        string_agg(v.text, '' ORDER BY t.place) FILTER (t.side = 'prompt') AS prompt,
        string_agg(v.text, '' ORDER BY t.place) FILTER (t.side = 'output') AS output
    FROM tokens AS t
    INNER JOIN vocabulary AS v ON t.tokenizer = v.tokenizer AND t.token_id = v.id
    GROUP BY t.number
)

SELECT
    c.form,
    c.made_for,
    c.rollout_id,
    c.agent_id,
    c.turn,
    c.tokenizer,
    len(c.prompt_ids) AS prompt_tokens,
    len(c.output_ids) AS output_tokens,
    t.prompt,
    t.output
FROM chosen AS c
LEFT JOIN texts AS t ON c.number = t.number
ORDER BY c.number;
