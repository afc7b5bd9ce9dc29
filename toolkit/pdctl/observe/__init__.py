"""From telemetry to what an on-call looks at: stack files, dashboards, alerts, traces, report."""
