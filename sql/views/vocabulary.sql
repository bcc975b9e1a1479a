-- One row per token of a tokenizer that a spec names. Bytes that are not valid text by themselves read as U+FFFD.
CREATE OR REPLACE VIEW vocabulary AS
SELECT * FROM lake.vocabulary;
