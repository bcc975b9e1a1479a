-- How many rollouts and turns an experiment dropped, by stage and reason.
SELECT
    stage,
    reason,
    count(*) AS n
FROM dropped
WHERE experiment = getvariable('experiment')
GROUP BY ALL
ORDER BY stage ASC, n DESC, reason ASC;
