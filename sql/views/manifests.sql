-- One row per publication of an asset's version, with its inputs. state is current, blocked or past.
CREATE OR REPLACE VIEW manifests AS
SELECT * FROM lake.manifests;
