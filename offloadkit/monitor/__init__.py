"""Live view of a training run: `monitor.Monitor` shows what telemetry recorded.

`figures` computes the numbers, `words` and `page` turn them into text and HTML, `notebook` and `terminal` display them.
"""
