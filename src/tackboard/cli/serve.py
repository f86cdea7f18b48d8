"""`tackboard serve BUNDLE` answers requests for scores over HTTP; `tackboard score REQUEST.json` ranks one request."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from tackboard.features.serving_log import FeatureLog
    from tackboard.scoring.scorer import Scorer
    from tackboard.serve.server import ServeConfig


def serve(
    bundle: Path = typer.Argument(..., help="Serve this bundle, as written by `tackboard export`."),
    host: str = typer.Option("127.0.0.1", help="Listen on this address; needs a token or --insecure unless local."),
    port: int = typer.Option(8000, help="Listen on this port; 0 takes a free port."),
    max_queue: int = typer.Option(64, help="Let at most this many requests wait for the model; more get 429."),
    timeout_ms: int = typer.Option(1000, help="Answer within this many ms if a request names no deadline."),
    max_body_mib: int = typer.Option(64, help="Accept request bodies up to this size, in MiB."),
    max_candidates: int = typer.Option(10_000, help="Accept at most this many candidates in a request."),
    max_connections: int = typer.Option(
        512, help="Keep at most this many connections; a new connection replaces a waiting one or gets 429."
    ),
    max_connections_per_address: int = typer.Option(
        256, help="Keep at most this many connections of one client; a proxy may need more."
    ),
    max_events: int = typer.Option(100_000, help="Accept at most this many events in a request's history."),
    context_cache_mib: int = typer.Option(0, help="Keep contexts of users in this many MiB; see docs/serving.md."),
    drain_timeout_s: float = typer.Option(25.0, help="After SIGTERM, finish admitted requests in this many seconds."),
    threads: int | None = typer.Option(None, help="Use this many threads; default: all usable cores but one."),
    code: Path | None = typer.Option(None, help="Run this Python file, which holds a model of your own."),
    port_file: Path | None = typer.Option(None, help="Write the port to this file once the server is ready."),
    token_file: Path | None = typer.Option(None, help="Read the token from this file instead of TACKBOARD_TOKEN."),
    insecure: bool = typer.Option(False, "--insecure", help="Serve other machines without a token."),
    log_features: Path | None = typer.Option(None, help="Log served features into this folder, for `features replay`."),
    log_key: Path | None = typer.Option(
        None, help="Hash user ids in the log of features with the key in this file: 64 hex digits."
    ),
    log_sample: float = typer.Option(1.0, help="Log this share of the requests, 0 to 1."),
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
        context_cache_mib=context_cache_mib,
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
        # A killed server may have left this file behind, and a script would read a wrong port from it.
        port_file.unlink(missing_ok=True)
    # A taken port is reported before torch is imported and the model is loaded, because both may take long.
    take_port(config).close()
    from tackboard.scoring.scorer import Scorer

    # One core is left to the event loop. Otherwise the model would wait for a thread that shares a core with the loop.
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
        # A thread still computes scores that nobody waits for. A normal exit may abort while a thread runs in torch.
        sys.stdout.flush()
        os._exit(0)


def _announce(name: str, port_file: Path | None, url: str) -> None:
    import gc

    from tackboard.core.files import write_text_atomic, writing

    # After `freeze`, the garbage collector skips all present objects. Visiting them would block the loop for 100 ms.
    gc.collect()
    gc.freeze()
    if port_file is not None:
        with writing("--port-file", port_file):
            write_text_atomic(port_file, url.rsplit(":", 1)[1] + "\n")
    print(f"serving {name} on {url}", flush=True)


def score(
    request: Path = typer.Argument(..., help="Read this JSON file of history and candidates; - reads stdin."),
    url: str | None = typer.Option(None, help="Ask this server; default: http://127.0.0.1:8000."),
    binary: bool = typer.Option(False, "--binary", help="Send and receive binary tensors instead of JSON."),
    token_file: Path | None = typer.Option(None, help="Read the token from this file, not TACKBOARD_TOKEN."),
    offline: bool = typer.Option(False, "--offline", help="Score in this process, from --bundle, without a server."),
    bundle: Path | None = typer.Option(None, help="Score with this bundle; needs --offline."),
    code: Path | None = typer.Option(None, help="Run this file, which holds a model of your own; needs --offline."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object instead of text."),
    top_k: int | None = typer.Option(None, help="Print at most this many of the best candidates."),
) -> None:
    """Score candidates for one user's history and print them, best first."""
    import sys

    import numpy as np

    from tackboard.core.config import check
    from tackboard.core.errors import TackboardError, UsageError
    from tackboard.scoring.client import ScoringClient, read_request

    check(top_k is None or top_k >= 1, "top_k", top_k, "at least 1")
    if offline != (bundle is not None):
        raise UsageError("--offline and --bundle go together", fix="give both, or give neither to ask a server")
    if offline and (binary or url is not None):
        raise UsageError("--offline does not ask a server", fix="leave out --url and --binary")
    if not offline and code is not None:
        raise UsageError("--code works only with --offline", fix="start the server with its own --code")
    try:
        text = sys.stdin.buffer.read() if str(request) == "-" else request.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{request} cannot be read: {error.strerror}", fix="give a JSON file, or - for stdin"
        ) from None
    history, candidates, more = read_request(text)
    if bundle is not None:
        from tackboard.core.errors import counted
        from tackboard.core.progress import say
        from tackboard.scoring.scorer import Scorer

        scorer = Scorer.load(bundle, code_file=code)
        model = str(scorer.signature.name)
        read = scorer.reader.read(history, candidates, **more)
        for field, number in read.num_unknown.items():
            say(f"warning: {field} of {counted(number, 'event')} is missing or was never seen in training")
        scores = scorer.score(read)
    else:
        from tackboard.serve.tokens import read_token

        client = ScoringClient(url or "http://127.0.0.1:8000", token=read_token(token_file))
        scores = client.score(history, candidates, binary=binary, **more)
        model = client.model
    if not np.isfinite(scores).all():
        raise TackboardError(
            "the model gave scores that are not finite numbers", fix="check whether the model was trained to the end"
        )
    order = np.argsort(-np.asarray(scores), kind="stable")[:top_k]
    ranked = [{"item": candidates[index], "score": float(scores[index])} for index in order]
    if json_output:
        typer.echo(json.dumps({"model": model, "num_candidates": len(candidates), "ranked": ranked}))
        return
    width = max([4, *(len(str(entry["item"])) for entry in ranked)])
    typer.echo(f"{'rank':>4}  {'item':<{width}}  {'score':>12}")
    for rank, entry in enumerate(ranked, start=1):
        typer.echo(f"{rank:>4}  {entry['item']!s:<{width}}  {entry['score']:>12.6f}")
