"""Stands in for `python -m tackboard` in the tests of the pipeline: every command, in no time, with the real answers.

FAKE_FAIL=STAGE:CODE makes a stage fail, FAKE_HANG=STAGE makes it wait for ever beside a child of its own, and
FAKE_SKEW=1 makes offline scores differ from the server's.
"""

import json
import os
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def score_of(history: list[int], item: int) -> float:
    return (item * 37 % 101) / 101 - 0.5 + len(history) / 1000


def data() -> dict:
    if sys.argv[2] == "pseudo-requests":
        assert (Path(sys.argv[3]) / "events.parquet").exists()
        return {"counts": {"requests": 30, "candidates": 300}, "rules": {"per_user": 1, "candidates": 9}}
    import pyarrow as pa
    import pyarrow.parquet as parquet

    folder = Path(option("--out")) / option("--name")
    folder.mkdir(parents=True)
    users = [user for user in range(30) for _ in range(5)]
    items = [1000 + (index * 7) % 50 for index in range(len(users))]
    events = {"user_id": users, "user": users, "item": items, "action": ["click"] * 150, "surface": ["home"] * 150}
    times = {"time_ms": list(range(150)), "received_ms": list(range(150))}
    parquet.write_table(pa.table(events | times), folder / "events.parquet")
    parquet.write_table(pa.table({"item": list(range(1000, 1050))}), folder / "items.parquet")
    return {"dataset": str(folder), "statistics": {"num_events": 150, "num_users": 30, "num_items": 50}}


def train() -> dict:
    recipe = sys.argv[2]
    run = Path(option("--runs")) / recipe
    if recipe.startswith("finetune-") and recipe != "finetune-none":
        assert Path(option("--from")).name == "demo", "a ranker starts from the PinFM"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"training": {"steps": 20}}))
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 21):
            file.write(json.dumps({"step": step, "loss": 5 / step + 1, "tokens_per_s": 10.0}) + "\n")
    trimming = {"read": ["item"], "skipped": ["surface"], "bytes": 1200, "bytes_saved": 1200}
    figures = {"step": 20, "tokens_per_s": 10.0, "final_loss": 1.25}
    return {"run": str(run), "status": "done", "checkpoint": "c", "trimming": trimming, **figures}


def evaluate() -> dict:
    recipe = Path(sys.argv[2]).name
    if recipe.startswith("finetune-"):
        more = {"auc": 0.7, "auc_within_users": 0.7, "ne": 0.9}
        hits = {"item mean": 0.1, "model": 0.2 if recipe == "finetune-none" else 0.3}
        ranked = [
            {"name": name, "label": label, "hit@3": hit, **more}
            for label in ("next", "save")
            for name, hit in hits.items()
        ]
        return {"rows": ranked, "num_users": 6, "num_candidates": 60}
    heights = {"popularity": 0.1, "item-to-item": 0.2, "model": 0.3, "oracle": 0.4}
    closed = float(os.environ.get("FAKE_GAP", "0.5"))
    keys = ("hr@1", "hr@10", "ndcg@10")
    rows = [{"name": name, **dict.fromkeys(keys, value)} for name, value in heights.items()]
    return {"rows": rows, "num_users": 30, "gap_closed": closed, "filter_seen": False, "users_per_s": 100.0}


def export() -> dict:
    assert Path(sys.argv[2]).name.startswith("finetune-late"), "the ranker on PinFM is served"
    bundle = Path(option("--out"))
    bundle.mkdir(parents=True)
    from tackboard.core.manifest import write_manifest

    signature = {"max_history": 3, "id_type": "int64", "model": {"config_class": "a:B"}, "tables": {}, "name": "demo"}
    (bundle / "signature.json").write_text(json.dumps(signature))
    write_manifest(bundle, "bundle")
    return {"bundle": str(bundle), "bytes": 12}


def score() -> dict:
    request = json.loads(Path(sys.argv[2]).read_text())
    skew = 1e-3 if os.environ.get("FAKE_SKEW") else 0.0
    history = [event["item"] for event in request["history"]]
    ranked = [{"item": item, "score": score_of(history, item) + skew * item} for item in request["candidates"]]
    return {"ranked": sorted(ranked, key=lambda entry: -entry["score"])}


def features() -> dict:
    """`features replay`: the log of the server, computed again."""
    assert sys.argv[2:4] == ["replay", str(Path(option("--data")).parents[1] / "served")]
    assert len(bytes.fromhex(Path(option("--key")).read_text())) >= 16
    return {"num_compared": 8, "num_values": 32, "num_mismatches": 0, "num_late": 1}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        names = ["history_item", "history_action", "history_surface", "history_time_ms", "candidate_item"]
        names += ["user", "request_time_ms"]
        kinds = {"history_action": "BYTES", "history_surface": "BYTES"}
        inputs = [{"name": name, "datatype": kinds.get(name, "INT64"), "shape": [-1]} for name in names]
        self.answer(json.dumps({"inputs": inputs}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if os.environ.get("FAKE_REFUSE"):
            self.answer(b'{"error": "the queue is full"}', status=429)
            return
        head_length = int(self.headers.get("Inference-Header-Content-Length") or len(body))
        head, place, values = json.loads(body[:head_length]), head_length, {}
        for tensor in head["inputs"]:
            size = tensor.get("parameters", {}).get("binary_data_size")
            if size is None:
                values[tensor["name"]] = tensor["data"]
            else:
                if tensor["datatype"] == "INT64":
                    values[tensor["name"]] = list(struct.unpack(f"<{size // 8}q", body[place : place + size]))
                place += size
        assert len(values["user"]) == len(values["request_time_ms"]) == 1
        scores = [score_of(values["history_item"], item) for item in values["candidate_item"]]
        output = {"name": "score", "datatype": "FP32", "shape": [len(scores)]}
        if head["outputs"][0]["parameters"].get("binary_data"):
            raw = struct.pack(f"<{len(scores)}f", *scores)
            output["parameters"] = {"binary_data_size": len(raw)}
            text = json.dumps({"model_name": "demo", "outputs": [output]}).encode()
            self.answer(text + raw, length=len(text))
        else:
            self.answer(json.dumps({"model_name": "demo", "outputs": [output | {"data": scores}]}).encode())

    def answer(self, body: bytes, *, status: int = 200, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if length is not None:
            self.send_header("Inference-Header-Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)


def serve() -> None:
    import signal

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    assert Path(option("--log-key")).exists()
    Path(option("--port-file")).write_text(str(server.server_address[1]))
    server.serve_forever(poll_interval=0.01)
    print("stopped")


def main() -> None:
    stage = sys.argv[1]
    failing, _, code = os.environ.get("FAKE_FAIL", "").partition(":")
    print(f"this is {stage}", file=sys.stderr, flush=True)
    if stage == failing:
        print("error: broken on purpose", file=sys.stderr)
        raise SystemExit(int(code))
    if stage == os.environ.get("FAKE_HANG"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        time.sleep(60)
    commands = {"data": data, "train": train, "evaluate": evaluate, "export": export, "score": score, "serve": serve}
    answer = (commands | {"features": features})[stage]()
    if answer is not None:
        print(json.dumps(answer), flush=True)
        print("a last word on stderr", file=sys.stderr)


if __name__ == "__main__":
    main()
