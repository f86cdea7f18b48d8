"""The online engine: requests over HTTP in, scores out, within a deadline or not at all.

`connection` guards the socket, `app` reads a request, `routes` names its call, `parsing` turns its body into a score
request with `protocol`, `tensors` and `inputs`, large ones in `parser_process`; `admission` takes it to the `model` in
time, `telemetry` counts, `server` starts and stops the whole.
"""
