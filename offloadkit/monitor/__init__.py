"""Live view of a training run: `monitor.Monitor` shows what telemetry recorded."""
