-- The suites of the catalog, with their tasks by split.
SELECT
    s.suite,
    s.title,
    s.family,
    count(t.task_id) AS tasks,
    count(t.task_id) FILTER (t.split = 'train') AS train,
    count(t.task_id) FILTER (t.split = 'heldout') AS heldout
FROM suites AS s
LEFT JOIN tasks AS t ON s.suite = t.suite
GROUP BY ALL
ORDER BY s.suite;
