-- The agents of rollouts of one partition (rollouts: their ids), with their scores.
SELECT
    a.rollout_id,
    a.agent_id,
    a.feature_id,
    a.role,
    a.exit_status,
    a.turns,
    a.output_tokens,
    a.patch,
    s.plan_first,
    s.plan_content,
    s.follow_through,
    s.reason,
    s.plan_entities,
    s.parse_rate
FROM agents AS a
LEFT JOIN agent_scores AS s
    ON
        a.rollout_id = s.rollout_id
        AND a.agent_id = s.agent_id
        AND a.origin = s.origin
        AND coalesce(a.rollout_set, a.experiment) = coalesce(s.rollout_set, s.experiment)
WHERE
    list_contains(getvariable('rollouts')::VARCHAR[], a.rollout_id)
    AND a.origin = getvariable('origin')
    AND (getvariable('origin') != 'set' OR a.rollout_set = getvariable('made_for'))
    AND (getvariable('origin') = 'set' OR a.experiment = getvariable('made_for'))
ORDER BY a.rollout_id, a.agent_id;
