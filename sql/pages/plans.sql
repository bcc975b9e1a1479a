-- How many rollouts a rollout set is to have: its tasks times the rollouts of each.
SELECT
    s.rollout_set,
    s.k,
    s.spec ->> '$.tasks' AS limit_of_tasks,
    count(t.task_id) FILTER (t.split = 'train') AS tasks
FROM rollout_sets AS s
LEFT JOIN tasks AS t ON s.suite = t.suite
GROUP BY ALL;
