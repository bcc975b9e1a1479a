-- One row per task of a suite.
CREATE OR REPLACE VIEW tasks AS
SELECT * FROM tasks.tasks;
