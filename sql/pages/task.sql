-- One task, of the suites that rollouts of the experiment come from.
SELECT
    task_id,
    suite,
    repo,
    split,
    instruction
FROM tasks
WHERE
    task_id = getvariable('task')
    AND suite IN (
        SELECT r.suite FROM rollouts AS r
        WHERE
            r.task_id = getvariable('task')
            AND (
                r.experiment = getvariable('experiment')
                OR r.rollout_set IN (
                    SELECT unnest(e.rollout_sets) FROM experiments AS e
                    WHERE e.experiment = getvariable('experiment')
                )
            )
    )
ORDER BY suite;
