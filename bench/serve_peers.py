"""`aquila bench serve` and clients that we did not write, in turns, against the same servers.

    python3 -m venv venv && venv/bin/pip install -r bench/serve_requirements.txt
    cargo build
    venv/bin/python bench/serve_peers.py --aquila target/debug/aquila --report serve.md

Two servers: `aquila serve`, with random weights in a shape whose tokens take about 10 ms on one
core, and servebench's server, which sleeps between tokens for times that are known and so answers
the same however busy the machine is. On each, every round has one run of each client with the same
prompts, in an order that rotates; ratios are those of one round. Counts must be equal.
"""

import argparse
import csv
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

WORDS = "time year people way day man thing world school state family student group country".split()
# The times of servebench's server, in milliseconds.
TTFT, ITL = 100.0, 20.0


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--aquila", type=Path, default=Path("target/debug/aquila"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--input-words", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--servers", default="sleeping,aquila")
    parser.add_argument("--peers", default="aiperf,servebench")
    parser.add_argument("--report", type=Path, help="write the tables here too")
    return parser.parse_args()


def tool(name):
    """A command of the packages beside this Python."""
    return str(Path(sys.executable).parent / name)


def model(options, folder):
    """A checkpoint without weights: the shipped model's tokenizer, a larger shape."""
    subprocess.run([options.aquila, "inspect", "tiny"], check=True, stdout=subprocess.DEVNULL)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # Not those of its heads, whose names begin alike.
    found = [path for path in cache.glob("aquila/models/tiny-*") if path.name.count("-") == 1]
    shipped = max(found, key=lambda path: path.stat().st_mtime)
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(shipped / name, folder)
    config = json.loads((shipped / "config.json").read_text())
    config |= {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 4}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def start(server, options, folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if server == "aquila":
        command = [options.aquila, "serve", folder, "--load-format", "dummy", "--threads", "1"]
        command += ["--speculative-algorithm", "NONE", "--disable-radix-cache"]
        command += ["--served-model-name", "m", "--port", str(port)]
    else:
        command = [tool("servebench"), "mock-server", "--port", str(port)]
        command += ["--ttft-ms", str(TTFT), "--itl-ms", str(ITL)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(list(map(str, command)), **quiet)
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/v1/models", timeout=5).read()
            return process, url
        except OSError:
            assert process.poll() is None, f"{server} ended"
            time.sleep(0.1)
    process.kill()
    raise SystemExit(f"{server} did not start")


def run(command, **more):
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=600, **more
    )
    assert done.returncode == 0, f"{command[0]}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    return done.stdout


def ours(options, url, prompts, scratch):
    command = [options.aquila, "bench", "serve", "--base-url", url, "--model", "m", "--ignore-eos"]
    command += ["--dataset-path", prompts["ours"], "--output-len", options.tokens, "--json", "-q"]
    figures = json.loads(run([*command, "--max-concurrency", options.concurrency]))
    return {
        "requests": figures["completed"],
        "input tokens": figures["total_input_tokens"],
        "output tokens": figures["total_output_tokens"],
        "output tokens/s": figures["output_throughput"],
        "mean TPOT": figures["mean_tpot_ms"],
        "mean TTFT": figures["mean_ttft_ms"],
    }


def aiperf(options, url, prompts, scratch):
    out = scratch / "aiperf"
    shutil.rmtree(out, ignore_errors=True)
    command = [tool("aiperf"), "profile", "-m", "m", "--url", url, "--streaming", "--ui", "none"]
    command += ["--endpoint-type", "completions", "--tokenizer", prompts["model"]]
    command += ["--input-file", prompts["aiperf"], "--custom-dataset-type", "single_turn"]
    command += ["--request-count", options.requests, "--concurrency", options.concurrency]
    command += ["--use-server-token-count", "--warmup-request-count", 1, "--artifact-dir", out]
    command += ["--extra-inputs", f"max_tokens:{options.tokens}", "temperature:0", "ignore_eos:true"]
    run(command, cwd=scratch)
    figures = json.loads((out / "profile_export_aiperf.json").read_text())
    mean = lambda name: figures[name]["avg"]
    return {
        "requests": mean("request_count"),
        "input tokens": mean("total_isl"),
        "output tokens": mean("total_osl"),
        "output tokens/s": mean("output_token_throughput"),
        "mean TPOT": mean("inter_token_latency"),
        "mean TTFT": mean("time_to_first_token"),
    }


def servebench(options, url, prompts, scratch):
    out = scratch / "requests.csv"
    command = [tool("servebench"), "run", "--url", f"{url}/v1", "--model", "m", "--warmup", 1]
    command += ["--endpoint", "completions", "--prompts", prompts["ours"], "--seed", 1]
    command += ["--num-requests", options.requests, "--concurrency", options.concurrency]
    run([*command, "--output-len", options.tokens, "--csv-requests", out], cwd=scratch)
    rows = [row for row in csv.DictReader(out.open()) if row["ok"] == "True"]
    column = lambda name: [float(row[name]) for row in rows]
    starts = column("start_s")
    ends = [start + whole for start, whole in zip(starts, column("e2e_s"))]
    return {
        "requests": len(rows),
        "input tokens": sum(column("prompt_tokens")),
        "output tokens": sum(column("output_tokens")),
        "output tokens/s": sum(column("output_tokens")) / (max(ends) - min(starts)),
        "mean TPOT": statistics.mean(column("tpot_ms")),
        "mean TTFT": statistics.mean(column("ttft_ms")),
    }


COUNTS = ("requests", "input tokens", "output tokens")
FIGURES = ("output tokens/s", "mean TPOT", "mean TTFT")


def compare(server, options, prompts, scratch):
    peers = [{"aiperf": aiperf, "servebench": servebench}[name] for name in options.peers.split(",")]
    clients = [ours, *peers]
    runs = []
    process, url = start(server, options, prompts["model"])
    try:
        for turn in range(options.rounds):
            first = turn % len(clients)
            order = clients[first:] + clients[:first]
            runs.append({client.__name__: client(options, url, prompts, scratch) for client in order})
            print(f"{server}: round {turn + 1} of {options.rounds}", file=sys.stderr)
    finally:
        process.terminate()
        process.wait()
    spread = lambda values: f"{statistics.median(values):.4g} ({min(values):.4g}–{max(values):.4g})"
    heads = ["ours", *(peer.__name__ for peer in peers)]
    heads += [f"ours / {peer.__name__}" for peer in peers]
    lines = [f"| {server} | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name in COUNTS:
        cells = [sorted({int(run[client.__name__][name]) for run in runs}) for client in clients]
        assert all(cell == cells[0] and len(cell) == 1 for cell in cells), (name, cells)
        lines.append(f"| {name} | " + " | ".join(str(*cell) for cell in cells) + " |" * (len(peers) + 1))
    for name in FIGURES:
        of = lambda client: [run[client.__name__][name] for run in runs]
        ratios = lambda peer: [a / b for a, b in zip(of(ours), of(peer))]
        cells = [spread(of(client)) for client in clients]
        cells += [spread(ratios(peer)) for peer in peers]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    options = arguments()
    options.aquila = options.aquila.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        prompts = {"model": model(options, scratch / "model")}
        choose = random.Random(1)
        texts = [
            " ".join(choose.choices(WORDS, k=options.input_words)) for _ in range(options.requests)
        ]
        for name, key in (("ours", "prompt"), ("aiperf", "text")):
            prompts[name] = scratch / f"{name}.jsonl"
            prompts[name].write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
        tables = [compare(s, options, prompts, scratch) for s in options.servers.split(",")]
    report = "\n\n".join(tables) + "\n"
    print(report)
    if options.report:
        options.report.write_text(report)


if __name__ == "__main__":
    main()
