-- One row per verdict that a later judge reversed: old and new reward and verdict, with the numbers of both judges.
-- reason has the lines of the judge's numbers in between; kept is the reason that `etpi taint --keep` recorded.
CREATE OR REPLACE VIEW flips AS
WITH pairs AS (
    SELECT
        *,
        lag(reward) OVER rollout AS old_reward,
        lag(verdict) OVER rollout AS old_verdict,
        lag(judge) OVER rollout AS old_judge
    FROM verdicts
    WHERE reward IS NOT NULL
    WINDOW rollout AS (PARTITION BY origin, made_for, rollout_id ORDER BY number)
)

SELECT
    p.rollout_id,
    p.task_id,
    p.origin,
    p.made_for,
    p.old_verdict,
    p.verdict AS new_verdict,
    p.old_reward,
    p.reward AS new_reward,
    p.old_judge,
    p.judge AS new_judge,
    p.reason,
    p.details,
    p.judged_at,
    k.reason AS kept
FROM pairs AS p
LEFT JOIN lake.kept_flips AS k ON p.rollout_id = k.rollout_id AND p.judge = k.judge
WHERE p.old_reward != p.reward;
