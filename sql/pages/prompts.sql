-- The messages of one rollout that no turn answers or wrote before the first turn: its prompts, and later notices.
SELECT
    agent_id,
    index,
    turn,
    role,
    content,
    kind
FROM messages
WHERE
    rollout_id = getvariable('rollout')
    AND origin = getvariable('origin')
    AND (getvariable('origin') != 'set' OR rollout_set = getvariable('made_for'))
    AND (getvariable('origin') = 'set' OR experiment = getvariable('made_for'))
    AND turn IS NULL
ORDER BY agent_id, index;
