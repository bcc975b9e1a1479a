"""`etpi audit`: faults of a training file or a checkpoint, found without a lake."""
