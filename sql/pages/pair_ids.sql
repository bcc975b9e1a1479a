-- The token ids of the training pair of one turn, as turn_ids gives those of the turn, with its weight in the data set.
WITH RECURSIVE own AS MATERIALIZED (
    SELECT
        turn,
        prefix_turn,
        suffix_ids,
        output_ids,
        capture,
        prompt_edit,
        think_removed,
        format_tokens,
        metadata
    FROM tito_pairs.pairs
    WHERE
        experiment = getvariable('experiment')
        AND rollout_id = getvariable('rollout')
        AND agent_id = getvariable('agent')
),

chain AS (
    SELECT
        turn,
        prefix_turn
    FROM own
    WHERE turn = getvariable('turn')
    UNION ALL
    SELECT
        o.turn,
        o.prefix_turn
    FROM chain AS c
    INNER JOIN own AS o ON c.prefix_turn = o.turn
),

weighed AS (
    SELECT
        turn,
        split,
        weight,
        copies,
        sequence_id,
        span_start,
        span_end
    FROM dataset_rows
    WHERE
        experiment = getvariable('experiment')
        AND rollout_id = getvariable('rollout')
        AND agent_id = getvariable('agent')
        AND turn = getvariable('turn')
)

SELECT
    o.*,
    w.split,
    w.weight,
    w.copies,
    w.sequence_id
FROM chain AS c
INNER JOIN own AS o ON c.turn = o.turn
LEFT JOIN weighed AS w ON o.turn = w.turn
ORDER BY o.turn;
