-- One row a publication of an asset's version: what it was made of. state is current, blocked or past.
CREATE OR REPLACE VIEW manifests AS
SELECT * FROM lake.manifests;
