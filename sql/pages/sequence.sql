-- One merged sequence.
SELECT *
FROM sequences
WHERE experiment = getvariable('experiment') AND sequence_id = getvariable('sequence')
LIMIT 1;
