-- The sequences of a data set's training split, their labels and tokens, and the weights of the labels.
WITH spans AS (
    SELECT
        len(input_ids) AS tokens,
        list_sum(span_ends) - list_sum(span_starts) AS labels,
        list_sum(
            list_transform(list_zip(span_weights, span_starts, span_ends), LAMBDA x: x[1] * (x[3] - x[2]))
        ) AS weights
    FROM sequences
    WHERE split = 'train'
)

SELECT
    count(*) AS sequences,
    coalesce(sum(labels), 0)::BIGINT AS labels,
    coalesce(sum(tokens), 0)::BIGINT AS tokens,
    coalesce(sum(weights), 0)::DOUBLE AS weights
FROM spans;
