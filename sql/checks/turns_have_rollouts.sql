-- Turns whose rollout is missing from the lake.
SELECT
    t.origin,
    t.rollout_set,
    t.experiment,
    t.rollout_id,
    t.agent_id,
    t.turn
FROM turns AS t
ANTI JOIN rollouts AS r
    ON t.rollout_id = r.rollout_id AND t.origin = r.origin AND t.made_for = r.made_for;
