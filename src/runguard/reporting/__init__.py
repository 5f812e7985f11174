"""What leaves the process: callbacks, alarms, telemetry and the journal. Never on the path of a call."""
