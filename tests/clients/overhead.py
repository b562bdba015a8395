"""What the server costs: CPU time per token of 64 streams, over the engine alone.

    python3 tests/clients/overhead.py target/release/aquila

Runs the same requests through `aquila generate` (the engine alone) and through `aquila serve`,
alternating, and compares the CPU time of the two processes per token. The engine's share of the
start is taken out by a run of one token each. Then leaves the server alone for a while and says
what CPU time it took. What stands behind `--` are flags for both, such as
`--speculative-algorithm NONE`, with which every token is an event. Needs nothing but Python.
"""

import argparse
import asyncio
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time

PROMPTS = [f"fn add_{i}(a: u32, b: u32) -> u32 {{" for i in range(64)]


def children_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def engine_seconds(binary, flags, tokens):
    """CPU seconds of answering all prompts offline, start included."""
    with tempfile.TemporaryDirectory() as folder:
        lines = (
            json.dumps({"id": i, "prompt": p, "sampling": sampling(tokens)})
            for i, p in enumerate(PROMPTS)
        )
        source = os.path.join(folder, "in.jsonl")
        with open(source, "w") as file:
            file.write("\n".join(lines) + "\n")
        before = children_seconds()
        command = [binary, "generate", *flags, "--input", source, "--output", source + ".out", "-q"]
        subprocess.run(command, check=True)
        with open(source + ".out") as file:
            answered = sum(len(json.loads(line)["token_ids"]) for line in file)
        assert answered == tokens * len(PROMPTS), answered
        return children_seconds() - before


def sampling(tokens):
    return {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def process_seconds(pid):
    """CPU seconds of a process, to the nanosecond: the clock that Linux has for each."""
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e9


async def stream(port, prompt, tokens):
    """Streams one answer; the number of events that carried text."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": prompt, "stream": True, **sampling(tokens)}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    events = 0
    rest = b""
    while b"data: [DONE]" not in rest:
        block = await reader.read(1 << 16)
        assert block, "the stream ended early"
        rest = rest[-16:] + block
        events += block.count(b"data: {")
    writer.close()
    return events


async def streams(port, tokens):
    return sum(await asyncio.gather(*(stream(port, p, tokens) for p in PROMPTS)))


class Server:
    def __init__(self, binary, flags):
        command = [binary, "serve", *flags, "--port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if found := re.search(r"ready: http://[^ ]*:(\d+)/", line):
                self.port = int(found[1])
                break
        # The log is read, as it is by whoever keeps it.
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def seconds(self, tokens):
        before = process_seconds(self.process.pid)
        events = asyncio.run(streams(self.port, tokens))
        asyncio.run(flush(self.port))
        return process_seconds(self.process.pid) - before, events

    def stop(self):
        self.process.terminate()
        assert self.process.wait(30) == 0


async def flush(port):
    """Every run reads its prompts anew, as the engine alone does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /flush_cache HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    await reader.read()
    writer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--limit", type=float, default=50.0, help="microseconds per token")
    parser.add_argument("--idle", type=float, default=20.0, help="seconds without requests")
    own, _, both = (" ".join(sys.argv[1:]) + " ").partition(" -- ")
    arguments = parser.parse_args(own.split())
    flags = ["--max-running-requests", str(len(PROMPTS)), *both.split()]
    total = arguments.tokens * len(PROMPTS)
    server = Server(arguments.binary, flags)
    server.seconds(arguments.tokens)
    costs = []
    for _ in range(arguments.runs):
        start = engine_seconds(arguments.binary, flags, 1)
        alone = engine_seconds(arguments.binary, flags, arguments.tokens) - start
        served, events = server.seconds(arguments.tokens)
        costs.append((served - alone) / total * 1e6)
        print(
            f"engine alone {alone / total * 1e6:7.1f} µs/token, served "
            f"{served / total * 1e6:7.1f} µs/token ({events} events), "
            f"overhead {costs[-1]:6.1f} µs/token"
        )
    # Threads that waited for more to do have ended by then.
    time.sleep(15)
    before = process_seconds(server.process.pid)
    time.sleep(arguments.idle)
    idle = (process_seconds(server.process.pid) - before) / arguments.idle
    print(f"idle: {idle * 1e6:.0f} µs of CPU per second")
    server.stop()
    median = statistics.median(costs)
    print(f"median overhead {median:.1f} µs of CPU per token at {len(PROMPTS)} streams")
    raise SystemExit(median > arguments.limit)


if __name__ == "__main__":
    main()
