"""The online engine: requests over HTTP in, scores out, within a deadline or not at all.

`connection` guards the socket, `app` reads a request, `routes` names its call, `protocol` and `tensors` decode it,
`model` turns it into a score request, `admission` takes it to the model in time, `telemetry` counts, `server` starts
and stops the whole.
"""
