-- One task, of the suites that rollouts of the experiment come from.
SELECT DISTINCT
    task_id,
    suite,
    repo,
    split,
    instruction
FROM tasks
WHERE task_id = getvariable('task');
