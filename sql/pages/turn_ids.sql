-- The token ids of one turn: of its whole prompt, in the pieces that the turns before it added, and of its output. The
-- recursion follows one agent's turns only, so that no other prompt is rebuilt.
WITH RECURSIVE own AS MATERIALIZED (
    SELECT
        turn,
        prefix_turn,
        suffix_ids,
        output_ids,
        logprobs,
        capture,
        drift_at,
        drift
    FROM turns
    WHERE
        rollout_id = getvariable('rollout')
        AND agent_id = getvariable('agent')
        AND origin = getvariable('origin')
        AND (getvariable('origin') != 'set' OR rollout_set = getvariable('made_for'))
        AND (getvariable('origin') = 'set' OR experiment = getvariable('made_for'))
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
)

SELECT
    o.turn,
    o.prefix_turn,
    o.suffix_ids,
    o.output_ids,
    o.logprobs,
    o.capture,
    o.drift_at,
    o.drift,
    (
        SELECT coalesce(sum(len(p.output_ids)), 0) FROM own AS p
        WHERE p.turn < getvariable('turn')
    ) AS outputs_before
FROM chain AS c
INNER JOIN own AS o ON c.turn = o.turn
ORDER BY o.turn;
