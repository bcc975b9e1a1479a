-- One merged sequence.
SELECT *
FROM sequences
WHERE experiment = getvariable('experiment') AND sequence_id = getvariable('sequence')
ORDER BY sequence_id
LIMIT 1;
