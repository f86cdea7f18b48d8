"""Holds the online engine, which answers each request over HTTP with scores before its deadline, or with a refusal.

`listener` accepts connections, and `connection` limits them. `app` reads a request, and `routes` finds the call that
the path names. `parsing` turns the body into a score request with `protocol`, `tensors` and `inputs`; large bodies are
parsed in `parser_process`. `admission` takes the request to the `model` before its deadline, `telemetry` counts
requests and refusals, and `server` starts and stops everything.
"""
