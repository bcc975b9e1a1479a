"""`push` and `pull`: exchange versions, checkpoints and journals between a lake and a bucket."""
