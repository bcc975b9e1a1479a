"""`etpi audit`: faults of a training file, without a lake."""
