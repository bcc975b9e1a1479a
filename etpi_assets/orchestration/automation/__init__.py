"""Sensors and schedules that start runs without a person. All of them are off until someone switches them on.

`conditions`: cheap assets follow their inputs. `import_folders`: a sensor for files of imported rollout sets.
`schedule`: experiments at fixed times. `alerts`: a message for every failed run.
"""
