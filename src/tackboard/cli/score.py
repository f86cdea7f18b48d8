"""`tackboard score REQUEST.json`: ranks the candidates of one request, through a server or without one."""

from __future__ import annotations

from pathlib import Path

import typer


def score(
    request: Path = typer.Argument(..., help="A JSON file with history and candidates; - reads standard input."),
    url: str | None = typer.Option(None, help="The server to ask; http://127.0.0.1:8000 if not given."),
    binary: bool = typer.Option(False, "--binary", help="Send and receive binary tensors instead of JSON."),
    token_file: Path | None = typer.Option(None, help="Read the server's token from here, not TACKBOARD_TOKEN."),
    offline: bool = typer.Option(False, "--offline", help="Score in this process, from --bundle, without a server."),
    bundle: Path | None = typer.Option(None, help="The bundle for --offline."),
    code: Path | None = typer.Option(None, help="With --offline: the Python file of a model of your own; it is run."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
    top_k: int | None = typer.Option(None, help="Print the best so many only."),
) -> None:
    """Score candidates for one user's history and print them, best first."""
    import json
    import sys

    import numpy as np

    from tackboard.core.config import check
    from tackboard.core.errors import TackboardError, UsageError
    from tackboard.scoring.client import ScoringClient, read_request

    check(top_k is None or top_k >= 1, "top_k", top_k, "at least 1")
    if offline != (bundle is not None):
        raise UsageError("--offline and --bundle go together", fix="give both, or neither to ask a server")
    if offline and (binary or url is not None):
        raise UsageError("--offline asks no server", fix="leave out --url and --binary")
    if not offline and code is not None:
        raise UsageError("--code is for --offline", fix="a server is started with its own --code")
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
        raise TackboardError("the model gave scores that are not finite numbers", fix="was it trained to the end?")
    order = np.argsort(-np.asarray(scores), kind="stable")[:top_k]
    ranked = [{"item": candidates[index], "score": float(scores[index])} for index in order]
    if json_output:
        typer.echo(json.dumps({"model": model, "num_candidates": len(candidates), "ranked": ranked}))
        return
    width = max([4, *(len(str(entry["item"])) for entry in ranked)])
    typer.echo(f"{'rank':>4}  {'item':<{width}}  {'score':>12}")
    for rank, entry in enumerate(ranked, start=1):
        typer.echo(f"{rank:>4}  {entry['item']!s:<{width}}  {entry['score']:>12.6f}")
