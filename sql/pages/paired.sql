-- The changes of an experiment's metrics between its checkpoints, as its report has them.
SELECT * EXCLUDE (experiment, word)
FROM changes
WHERE experiment = getvariable('experiment')
ORDER BY metric, decoding;
