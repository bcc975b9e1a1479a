-- Which training rollouts raised or lowered the held-out metric, and by which turn most?
-- SET VARIABLE experiment = 'name' for one experiment. The most harmful first; the view blame_rollouts says what harm
-- and influence are. `etpi blame` shows groups of them.
SELECT * FROM blame_rollouts
WHERE getvariable('experiment') IS NULL OR experiment = getvariable('experiment')
ORDER BY experiment, harm, rollout_id;
