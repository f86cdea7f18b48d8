"""`tackboard serve BUNDLE`: answers requests for scores over HTTP until it is told to stop."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from tackboard.features.serving_log import FeatureLog
    from tackboard.scoring.scorer import Scorer
    from tackboard.serve.server import ServeConfig


def serve(
    bundle: Path = typer.Argument(..., help="A bundle, as written by `tackboard export`."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; other machines need a token or --insecure."),
    port: int = typer.Option(8000, help="Port to listen on; 0 takes a free one."),
    max_queue: int = typer.Option(64, help="Most requests that wait for the model; more get 429."),
    timeout_ms: int = typer.Option(1000, help="Deadline of a request that names none, in milliseconds."),
    max_body_mib: int = typer.Option(64, help="Largest request body, in MiB."),
    max_candidates: int = typer.Option(10_000, help="Most candidates in one request."),
    max_connections: int = typer.Option(512, help="Most connections; one more drops a waiting one or gets 429."),
    max_connections_per_address: int = typer.Option(256, help="Most connections of one client; a proxy may need more."),
    max_events: int = typer.Option(100_000, help="Most events of the history in one request."),
    drain_timeout_s: float = typer.Option(25.0, help="Time for admitted requests after SIGTERM, in seconds."),
    threads: int | None = typer.Option(None, help="Threads of the model; all usable cores but one if not given."),
    code: Path | None = typer.Option(None, help="The Python file of a model of your own; it is run."),
    port_file: Path | None = typer.Option(None, help="Write the port here once the server is ready."),
    token_file: Path | None = typer.Option(None, help="Read the token from here instead of TACKBOARD_TOKEN."),
    insecure: bool = typer.Option(False, "--insecure", help="Serve other machines without a token."),
    log_features: Path | None = typer.Option(None, help="Log what the model was given here, for `features replay`."),
    log_key: Path | None = typer.Option(None, help="The key that hides users in that log: 64 hexadecimal digits."),
    log_sample: float = typer.Option(1.0, help="Share of requests that are logged, 0 to 1."),
) -> None:
    """Serve a bundle over the Open Inference Protocol (HTTP)."""
    from tackboard.core.config import check
    from tackboard.core.errors import UsageError
    from tackboard.core.machine import usable_cores
    from tackboard.features.serving_log import FeatureLog, FeatureLogConfig, read_key
    from tackboard.serve.admission import AdmissionConfig
    from tackboard.serve.connection import ConnectionLimits
    from tackboard.serve.protocol import ProtocolLimits
    from tackboard.serve.server import ServeConfig, take_port
    from tackboard.serve.tokens import read_token

    check(max_body_mib >= 1, "max_body_mib", max_body_mib, "at least 1 MiB")
    check(threads is None or threads >= 1, "threads", threads, "at least 1")
    if port_file is not None and not port_file.parent.is_dir():
        raise UsageError(f"--port-file {port_file}: its folder does not exist", fix="make the folder first")
    if (log_features is None) != (log_key is None):
        raise UsageError(
            "--log-features and --log-key go together",
            fix="make a key: python -c 'import secrets; print(secrets.token_hex(32))' > log.key",
        )
    log_config, key = FeatureLogConfig(sample=log_sample), read_key(log_key) if log_key is not None else b""
    config = ServeConfig(
        host=host,
        port=port,
        token=read_token(token_file),
        insecure=insecure,
        max_candidates=max_candidates,
        max_events=max_events,
        drain_timeout_s=drain_timeout_s,
        admission=AdmissionConfig(
            max_queue=max_queue, timeout_ms=timeout_ms, max_timeout_ms=max(timeout_ms, AdmissionConfig().max_timeout_ms)
        ),
        protocol=ProtocolLimits(max_body_bytes=max_body_mib << 20),
        connection=ConnectionLimits(
            max_connections=max_connections,
            max_connections_per_address=max_connections_per_address,
            max_body_bytes=max_body_mib << 20,
        ),
    )
    if port_file is not None:
        # One that a killed server left behind would send a script to the wrong port.
        port_file.unlink(missing_ok=True)
    # A taken port is told before torch is imported and the model loaded, which may take long.
    take_port(config).close()
    from tackboard.scoring.scorer import Scorer

    # One core is left to the event loop: kernels whose threads wait for a core it holds are slower than with one less.
    scorer = Scorer.load(bundle, code_file=code, num_threads=threads or max(1, usable_cores() - 1))
    log = None if log_features is None else FeatureLog(log_features, scorer.features, key, log_config)
    _run(scorer, config, log, port_file)


def _run(scorer: Scorer, config: ServeConfig, log: FeatureLog | None, port_file: Path | None) -> None:
    import os
    import sys

    from tackboard.serve.server import Server

    announce = partial(_announce, scorer.signature.name, port_file)
    try:
        ended = Server(scorer, config, on_ready=announce, feature_log=log).run()
    finally:
        if port_file is not None:
            port_file.unlink(missing_ok=True)
    if not ended:
        # The model is stuck in a computation that nobody waits for; the interpreter cannot end beneath it.
        sys.stdout.flush()
        os._exit(0)


def _announce(name: str, port_file: Path | None, url: str) -> None:
    import gc

    from tackboard.core.files import write_text_atomic, writing

    # What is loaded by now stays. Looking through all of torch for garbage would hold up the loop for 100 ms.
    gc.collect()
    gc.freeze()
    if port_file is not None:
        with writing("--port-file", port_file):
            write_text_atomic(port_file, url.rsplit(":", 1)[1] + "\n")
    print(f"serving {name} on {url}", flush=True)
