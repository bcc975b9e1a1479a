-- Pairs whose input does not come back at the length it was made with.
SELECT
    experiment,
    pair_id,
    input_tokens,
    len(input_ids) AS rebuilt_tokens
FROM tito_pairs
WHERE len(input_ids) IS DISTINCT FROM input_tokens;
