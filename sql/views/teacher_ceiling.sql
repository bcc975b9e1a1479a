-- One row per metric of an experiment: the teacher beside the student.
CREATE OR REPLACE VIEW teacher_ceiling AS
SELECT * FROM teacher_ceiling.teacher_ceiling;
