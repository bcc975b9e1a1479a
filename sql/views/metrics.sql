-- One row per measured rate or mean, with n and its 95 % interval.
CREATE OR REPLACE VIEW metrics AS
SELECT * FROM eval_metrics.metrics;
