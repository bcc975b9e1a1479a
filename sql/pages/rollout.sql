-- One rollout with its scores and the instruction of its task. origin, made_for and rollout name it.
SELECT
    r.*,
    coalesce(s.reward, try_cast(r.outcome ->> '$.reward' AS DOUBLE)) AS reward,
    s.verdict,
    s.plan_first,
    s.plan_first_reason,
    s.plan_content,
    s.plan_content_reason,
    s.follow_through,
    s.output_tokens,
    s.turns,
    s.infrastructure_error,
    t.instruction,
    t.split
FROM rollouts AS r
LEFT JOIN scores AS s
    ON r.rollout_id = s.rollout_id AND r.origin = s.origin AND r.made_for = s.made_for
LEFT JOIN tasks AS t ON r.suite = t.suite AND r.task_id = t.task_id
WHERE
    r.rollout_id = getvariable('rollout')
    AND r.origin = getvariable('origin')
    AND (getvariable('origin') != 'set' OR r.rollout_set = getvariable('made_for'))
    AND (getvariable('origin') = 'set' OR r.experiment = getvariable('made_for'));
