-- What each experiment did with a rollout of a set: selected by which rule, or dropped (whole or turns of it) and why,
-- and how many rows of its data set come from it.
WITH taken AS (
    SELECT
        experiment,
        'selected' AS fate,
        'selection' AS stage,
        rule AS reason,
        NULL AS detail,
        NULL AS agent_id,
        NULL AS turn
    FROM selected
    WHERE rollout_id = getvariable('rollout')
    UNION ALL BY NAME
    SELECT
        experiment,
        'dropped' AS fate,
        stage,
        reason,
        detail,
        agent_id,
        turn
    FROM dropped
    WHERE rollout_id = getvariable('rollout')
)

SELECT *
FROM taken
ORDER BY experiment ASC, fate DESC, stage ASC, agent_id ASC, turn ASC;
