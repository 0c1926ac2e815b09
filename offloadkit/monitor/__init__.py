"""Live view of a training run: `monitor.Monitor` shows what telemetry recorded.

`figures` computes the numbers. `words` and `page` convert them to text and to HTML with charts. `notebook` and
`terminal` display them. `monitor` runs the drawing thread and handles stop requests.
"""
