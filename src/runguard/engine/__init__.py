"""The guard at work: it decides, counts the money of every call, and keeps the state of runs and lanes."""
