"""What adapters for agent frameworks share: one guarded run of calls and answers, and runs inside runs."""
