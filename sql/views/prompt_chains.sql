-- One row per agent: the data from which full_turns and tito_pairs rebuild prompts. pieces[i] is what turn numbers[i]
-- adds: prompt and output. paths[i] lists the positions of the pieces that its prompt begins with, in order: [] for a
-- whole prompt, and NULL if the turn claims to extend a turn that is missing or has no ids.
CREATE OR REPLACE VIEW prompt_chains AS
WITH stored AS (
    SELECT
        'turns' AS source,
        origin,
        made_for,
        rollout_id,
        agent_id,
        turn,
        prefix_turn,
        suffix_ids,
        output_ids
    FROM turns
    UNION ALL BY NAME
    SELECT
        'pairs' AS source,
        'set' AS origin,
        experiment AS made_for,
        rollout_id,
        agent_id,
        turn,
        prefix_turn,
        suffix_ids,
        output_ids
    FROM tito_pairs.pairs
),

agents_of AS (
    SELECT
        source,
        origin,
        made_for,
        rollout_id,
        agent_id,
        list(turn ORDER BY turn) AS numbers,
        list(CASE WHEN suffix_ids IS NOT NULL AND output_ids IS NOT NULL THEN turn END ORDER BY turn) AS extendable,
        list(prefix_turn ORDER BY turn) AS prefix_turns,
        list(list_concat(suffix_ids, output_ids) ORDER BY turn) AS pieces
    FROM stored
    GROUP BY source, origin, made_for, rollout_id, agent_id
)

SELECT
    source,
    origin,
    made_for,
    rollout_id,
    agent_id,
    numbers,
    pieces,
    -- Folds over the turns in order: a turn's path is the path of the turn it extends, plus that turn. 0 means a whole
    -- prompt. Elements are lists of lists because they must have the type of the fold's result. (noqa: the linter only
    -- parses a LAMBDA with one parameter.)
    list_reduce( -- noqa: PRS
        list_transform(
            prefix_turns, LAMBDA p : [[CASE WHEN p IS NULL THEN 0 ELSE list_position(extendable, p) END]]
        ),
        LAMBDA paths, x : list_append(
            paths,
            CASE
                WHEN x[1][1] = 0 THEN []
                WHEN paths[x[1][1]] IS NOT NULL THEN list_append(paths[x[1][1]], x[1][1])
            END
        ),
        []::INTEGER[][]
    ) AS paths
FROM agents_of;
