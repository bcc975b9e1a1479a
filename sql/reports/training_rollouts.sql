-- Which rollouts does an experiment train on, and whose teacher, licence, repository, sampler and importer are they of?
-- SET VARIABLE experiment = 'name' for one experiment. licence is that of the rollout set, else of the task.
-- `etpi blame EXPERIMENT --without KIND:VALUE` leaves them out by any of these.
SELECT
    s.experiment,
    s.rollout_id,
    s.teacher,
    s.repo,
    s.task_id,
    r.sampler,
    s.rollout_set,
    f.spec ->> '$.format' AS importer,
    coalesce(nullif(f.spec ->> '$.license', ''), t.payload ->> '$.license') AS licence
FROM selected AS s
LEFT JOIN rollouts AS r ON s.rollout_id = r.rollout_id AND r.origin = 'set'
LEFT JOIN rollout_sets AS f ON s.rollout_set = f.rollout_set
LEFT JOIN tasks AS t ON r.suite = t.suite AND s.task_id = t.task_id
WHERE getvariable('experiment') IS NULL OR s.experiment = getvariable('experiment')
ORDER BY s.experiment, s.rollout_id;
