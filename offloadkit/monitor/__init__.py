"""A training run to look at: `monitor.Monitor`, from what telemetry recorded.

`figures` holds what is shown, as numbers. `words` and `page` turn it into text and into HTML with charts. `notebook`
and `terminal` are where it is shown. `monitor` is the thread that draws, with the stop button and the interrupt.
"""
