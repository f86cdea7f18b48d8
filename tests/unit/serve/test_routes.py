from __future__ import annotations

import pytest

from tackboard.serve.errors import RequestError
from tackboard.serve.routes import Route, find_route


@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        ("GET", b"/v2", Route("server_metadata")),
        ("GET", b"/v2/", Route("server_metadata")),
        ("GET", b"/v2/health/live", Route("live")),
        ("HEAD", b"/v2/health/ready", Route("server_ready")),
        ("GET", b"/v2/models/stats", Route("all_stats")),
        ("GET", b"/metrics", Route("metrics")),
        ("GET", b"/v2/models/m", Route("metadata", "m")),
        ("GET", b"/v2/models/m/versions/1", Route("metadata", "m", "1")),
        ("GET", b"/v2/models/m/ready", Route("ready", "m")),
        ("GET", b"/v2/models/m/versions/1/ready", Route("ready", "m", "1")),
        ("POST", b"/v2/models/m/infer", Route("infer", "m")),
        ("POST", b"/v2/models/m/versions/12/infer", Route("infer", "m", "12")),
        ("GET", b"/v2/models/m/config", Route("config", "m")),
        ("GET", b"/v2/models/m/versions/1/stats", Route("stats", "m", "1")),
        ("GET", b"/v2/models/two%20words%2525", Route("metadata", "two words%25")),
        ("GET", b"/v2/models/caf%C3%A9", Route("metadata", "café")),
    ],
)
def test_paths(method: str, path: bytes, route: Route) -> None:
    assert find_route(method, path) == route


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", b"/", 404),
        ("GET", b"/v1/models", 404),
        ("GET", b"/v2/models", 404),
        ("GET", b"/v2/models/m/nope", 404),
        ("GET", b"/v2/models//config", 404),
        ("GET", b"/v2/models/m/versions", 404),
        ("GET", b"/v2/models/m/infer/more", 404),
        ("POST", b"/v2/repository/index", 404),
        ("GET", b"/v2/models/m/infer", 405),
        ("POST", b"/v2", 405),
        ("DELETE", b"/v2/models/m", 405),
        ("GET", b"/v2/models/..%2fetc", 400),
        ("GET", b"/v2/models/../m", 400),
        ("GET", b"/v2/models/%2e%2e/m", 400),
        ("GET", b"/v2/models/a%5cb", 400),
        ("GET", b"/v2/models/a%00b", 400),
        ("GET", b"/v2/models/a%0ab", 400),
        ("GET", b"/v2/models/%ff", 400),
    ],
)
def test_refused_paths(method: str, path: bytes, status: int) -> None:
    with pytest.raises(RequestError) as caught:
        find_route(method, path)
    assert caught.value.status == status


def test_a_wrong_method_names_the_right_one() -> None:
    with pytest.raises(RequestError) as caught:
        find_route("GET", b"/v2/models/m/infer")
    assert (b"allow", b"POST") in caught.value.headers()
