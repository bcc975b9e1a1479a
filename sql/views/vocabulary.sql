-- One row a token of a tokenizer that a spec names. Bytes that are no text by themselves read as U+FFFD.
CREATE OR REPLACE VIEW vocabulary AS
SELECT * FROM lake.vocabulary;
