"""What starts runs without a person, in Dagster's own terms. All of it is off until someone switches it on.

`conditions`: cheap assets follow their inputs. `import_folders`: a sensor for files of imported rollout sets.
`schedule`: experiments at fixed times. `alerts`: a message for every failed run.
"""
