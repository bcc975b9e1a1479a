-- What did the agents of a rollout read, say and run, on one clock?
-- SET VARIABLE rollout = 'rollout_id'; the default is the first rollout of an evaluation, else of any. A rollout that
-- was recorded in several places is shown of one: SET VARIABLE origin = 'eval'; SET VARIABLE made_for = 'name'.
-- One row per message. clock is its time, or that of the agent's last message before it; without times, messages are
-- ordered by turn. commands are the actions read from an assistant turn, exit_code that of the last command. The
-- observation of a turn is a message of its own.
SET VARIABLE asked = coalesce(
    getvariable('rollout'),
    (
        SELECT r.rollout_id FROM rollouts AS r
        ORDER BY r.origin != 'eval', r.rollout_id
        LIMIT 1
    )
);

WITH chosen AS (
    SELECT
        origin,
        made_for,
        rollout_id,
        started_at
    FROM rollouts
    WHERE
        rollout_id = getvariable('asked')
        AND (getvariable('origin') IS NULL OR origin = getvariable('origin'))
        AND (getvariable('made_for') IS NULL OR made_for = getvariable('made_for'))
    ORDER BY origin, made_for
    LIMIT 1
),

-- The views filter on the variable themselves, so that only this rollout's rows are read.
spoken AS (
    SELECT
        m.*,
        max(m.at) OVER (PARTITION BY m.agent_id ORDER BY m.index) AS last_at
    FROM messages AS m
    INNER JOIN chosen AS c ON m.origin = c.origin AND coalesce(m.rollout_set, m.experiment) = c.made_for
    WHERE m.rollout_id = getvariable('asked')
),

worked AS (
    SELECT t.*
    FROM turns AS t
    INNER JOIN chosen AS c ON t.origin = c.origin AND t.made_for = c.made_for
    WHERE t.rollout_id = getvariable('asked')
)

SELECT
    row_number() OVER (
        ORDER BY s.last_at ASC NULLS FIRST, coalesce(s.turn, -1) ASC, s.agent_id ASC, s.index ASC
    ) - 1 AS place,
    s.agent_id,
    a.role AS agent_role,
    s.turn,
    s.role,
    s.kind,
    s.last_at AS clock,
    coalesce(s.reasoning, w.reasoning) AS reasoning,
    s.content,
    s.tool_calls,
    w.actions AS commands,
    w.exit_code,
    w.parse_error,
    w.finish_reason,
    w.prompt_tokens,
    w.output_tokens,
    w.think_tokens
FROM spoken AS s
LEFT JOIN worked AS w ON s.role = 'assistant' AND s.agent_id = w.agent_id AND s.turn = w.turn
LEFT JOIN agents AS a
    ON
        s.rollout_id = a.rollout_id
        AND s.agent_id = a.agent_id
        AND s.origin = a.origin
        AND coalesce(s.rollout_set, s.experiment) = coalesce(a.rollout_set, a.experiment)
        AND a.rollout_id = getvariable('asked')
ORDER BY place;
