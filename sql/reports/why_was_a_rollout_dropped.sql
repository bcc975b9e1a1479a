-- Why was this rollout dropped? What each experiment did with it, beside its scores.
-- SET VARIABLE rollout = 'rollout_id'; the default is the first dropped rollout.
WITH fate AS (
    SELECT
        experiment,
        rollout_id,
        'taken' AS fate,
        'selection' AS stage,
        NULL AS agent_id,
        NULL AS turn,
        rule AS reason,
        NULL AS detail
    FROM selected
    UNION ALL BY NAME
    SELECT
        experiment,
        rollout_id,
        'dropped' AS fate,
        stage,
        agent_id,
        turn,
        reason,
        detail
    FROM dropped
)

SELECT
    f.rollout_id,
    f.experiment,
    f.fate,
    f.stage,
    f.agent_id,
    f.turn,
    f.reason,
    f.detail,
    s.reward,
    s.verdict,
    s.plan_first,
    s.plan_first_reason,
    s.plan_content,
    s.plan_content_reason,
    s.follow_through,
    s.exit_status
FROM fate AS f
LEFT JOIN experiments AS e ON f.experiment = e.experiment
-- Rollout sets that import the same runs have rollouts of the same ids.
LEFT JOIN scores AS s
    ON
        f.rollout_id = s.rollout_id
        AND s.origin = 'set'
        AND (e.experiment IS NULL OR list_contains(e.rollout_sets, s.rollout_set))
WHERE
    f.rollout_id = coalesce(
        getvariable('rollout'),
        (
            SELECT min(d.rollout_id) FROM dropped AS d
            WHERE d.stage = 'selection'
        ),
        (SELECT min(d.rollout_id) FROM dropped AS d)
    )
ORDER BY f.experiment ASC, f.fate DESC, f.stage ASC, f.agent_id ASC, f.turn ASC;
