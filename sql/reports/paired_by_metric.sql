-- How does each headline metric differ between an earlier and a later checkpoint, paired by task?
-- SET VARIABLE experiment = 'name' for one experiment. A task's value is the mean over its rollouts (samples, seeds);
-- the difference is the mean over tasks, with a normal 95 % interval from the differences of the tasks. higher and
-- lower count the tasks whose value rose and fell; sign_p is the two-sided exact sign test of these counts. Rollouts
-- with infrastructure errors do not count. Reports and the console pool over rollouts instead, with intervals that stay
-- between -1 and 1 (etpi_assets.evaluation.metrics.paired_changes). solved_paired has solved, and think tokens.
WITH worked AS (
    SELECT
        experiment,
        rollout_id,
        min(parse_rate) AS worst_parse_rate,
        sum(parse_rate * turns) / nullif(sum(turns), 0) AS parse_rate,
        avg((exit_status = 'Submitted')::INTEGER) AS submitted,
        -- null if an agent was offered no tool
        CASE WHEN count(*) = count(tool_turns) THEN max((tool_turns > 0)::INTEGER) END AS called
    FROM agent_scores
    WHERE origin = 'eval'
    GROUP BY experiment, rollout_id
),

valued AS (
    SELECT
        r.experiment,
        r.decoding,
        r.task_id,
        r.checkpoint_role,
        s.plan_first::DOUBLE AS plan_first,
        s.plan_content::DOUBLE AS plan_content,
        s.follow_through,
        s.plan_first_published::DOUBLE AS plan_first_published,
        s.plan_content_published::DOUBLE AS plan_content_published,
        s.follow_through_published,
        (s.reward = 1)::DOUBLE AS solved,
        w.called::DOUBLE AS called,
        coalesce((w.worst_parse_rate = 1)::DOUBLE, 0) AS parsed,
        w.parse_rate,
        w.submitted
    FROM rollouts AS r
    INNER JOIN scores AS s ON r.experiment = s.experiment AND r.rollout_id = s.rollout_id
    LEFT JOIN worked AS w ON r.experiment = w.experiment AND r.rollout_id = w.rollout_id
    WHERE
        r.origin = 'eval'
        AND s.origin = 'eval'
        AND NOT s.infrastructure_error
        AND (getvariable('experiment') IS NULL OR r.experiment = getvariable('experiment'))
),

measured AS (
    UNPIVOT valued
    ON
    plan_first, plan_content, follow_through, plan_first_published, plan_content_published,
    follow_through_published, solved, called, parsed, parse_rate, submitted
    INTO NAME metric VALUE value
),

by_task AS (
    SELECT
        experiment,
        metric,
        decoding,
        task_id,
        checkpoint_role,
        list_position(['base', 'sft', 'rl'], checkpoint_role) AS place,
        avg(value) AS value
    FROM measured
    GROUP BY experiment, metric, decoding, task_id, checkpoint_role
),

paired AS (
    SELECT
        earlier.experiment,
        earlier.metric,
        earlier.decoding,
        earlier.checkpoint_role AS before,
        later.checkpoint_role AS after,
        earlier.place,
        later.place AS later_place,
        count(*) AS tasks,
        avg(earlier.value) AS value_before,
        avg(later.value) AS value_after,
        avg(later.value - earlier.value) AS difference,
        1.96 * stddev_samp(later.value - earlier.value) / sqrt(count(*)) AS half_width,
        count(*) FILTER (later.value > earlier.value) AS higher,
        count(*) FILTER (later.value < earlier.value) AS lower
    FROM by_task AS earlier
    INNER JOIN by_task AS later
        ON
            earlier.experiment = later.experiment
            AND earlier.metric = later.metric
            AND earlier.decoding = later.decoding
            AND earlier.task_id = later.task_id
            AND earlier.place < later.place
    GROUP BY ALL
)

SELECT
    experiment,
    metric,
    decoding,
    before,
    after,
    tasks,
    value_before,
    value_after,
    difference,
    difference - half_width AS ci_low,
    difference + half_width AS ci_high,
    higher,
    lower,
    least(1, 2 * list_sum(list_transform(
        range(least(higher, lower) + 1),
        LAMBDA k: exp(
            lgamma(higher + lower + 1) - lgamma(k + 1) - lgamma(higher + lower - k + 1) - (higher + lower) * ln(2)
        )
    ))) AS sign_p
FROM paired
ORDER BY experiment ASC, metric ASC, decoding ASC, place ASC, later_place ASC;
