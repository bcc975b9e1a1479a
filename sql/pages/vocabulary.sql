-- The text of the given token ids of a tokenizer.
SELECT
    id,
    text
FROM vocabulary
WHERE tokenizer = getvariable('tokenizer') AND id IN (SELECT unnest(getvariable('ids')::INTEGER[]));
