"""Clients for minutes: every text is the offline text, no slot is lost, memory stays flat.

    python3 tests/clients/soak.py target/release/aquila --seconds 300
    python3 tests/clients/soak.py target/release/aquila --clients 32 --enable-overlap-schedule

Clients stream answers of random length, ask for whole ones, leave in the middle or abort by name.
What the server said is compared with `aquila generate` on the same prompts. Memory is compared
between the end of the first fifth and the end; how long a stream waits for its next piece is told
as median and 99th percentile. Other flags are the server's. Needs nothing but Python.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import statistics
import tempfile
import threading
import time

WISHES = 200


def wishes():
    numbers = random.Random(1)
    for seed in range(WISHES):
        prompt = f"fn number_{seed}{'(a: u32)' * numbers.randrange(6)} {{"
        yield {"prompt": prompt, "max_tokens": 1 + numbers.randrange(120), "seed": seed}


def offline(binary, asked):
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "in.jsonl")
        with open(source, "w") as file:
            for wish in asked:
                sampling = {"max_tokens": wish["max_tokens"], "seed": wish["seed"]}
                line = {"prompt": wish["prompt"], "sampling": {"temperature": 0.8, **sampling}}
                file.write(json.dumps(line) + "\n")
        command = [binary, "generate", "--input", source, "--output", source + ".out", "-q"]
        subprocess.run(command, check=True)
        with open(source + ".out") as file:
            return [json.loads(line)["text"] for line in file]


async def request(port, method, path, body=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


async def fetch(port, method, path, body=b""):
    reader, writer = await request(port, method, path, body)
    answer = await reader.read()
    writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0], answer
    return rest


class Soak:
    def __init__(self, port, clients, asked, expected):
        self.port, self.clients, self.asked, self.expected = port, clients, asked, expected
        self.compared = self.left = self.aborted = 0
        self.gaps = []

    async def client(self, number, until):
        numbers = random.Random(number)
        while time.monotonic() < until:
            index = numbers.randrange(len(self.asked))
            rid = f"{number}-{time.monotonic_ns()}"
            way = numbers.choice(["stream", "stream", "whole", "leave", "abort"])
            wish = {**self.asked[index], "temperature": 0.8, "stream": way != "whole", "rid": rid}
            body = json.dumps(wish).encode()
            if way == "whole":
                answer = json.loads(await fetch(self.port, "POST", "/v1/completions", body))
                self.compare(index, answer["choices"][0]["text"])
                continue
            reader, writer = await request(self.port, "POST", "/v1/completions", body)
            if way == "stream":
                data = await self.pieces(reader)
                self.compare(index, stream_text(data.split(b"\r\n\r\n", 1)[1]))
            else:
                await reader.readuntil(b"\r\n\r\n")
                for _ in range(numbers.randrange(8)):
                    await reader.readline()
                if way == "abort":
                    wish = json.dumps({"rid": rid}).encode()
                    await fetch(self.port, "POST", "/abort_request", wish)
                    await reader.read()
                    self.aborted += 1
                else:
                    self.left += 1
            writer.close()

    async def pieces(self, reader):
        """All that comes, noting how long each piece after the first two took: the head comes at
        once, the first token after the prompt."""
        data, last, count = b"", None, 0
        while piece := await reader.read(1 << 16):
            now, count = time.monotonic(), count + 1
            if count > 2:
                self.gaps.append(now - last)
            data, last = data + piece, now
        return data

    def compare(self, index, text):
        assert text == self.expected[index], (self.asked[index], text, self.expected[index])
        self.compared += 1

    async def resident(self):
        page = (await fetch(self.port, "GET", "/metrics")).decode()
        return float(re.search(r"process_resident_memory_bytes\{\S+ (\S+)", page)[1]) / 2**20

    async def run(self, seconds):
        begun = time.monotonic()
        clients = [asyncio.create_task(self.client(i, begun + seconds)) for i in range(self.clients)]
        memory = []
        for fifth in range(1, 6):
            await asyncio.sleep(max(0, begun + seconds * fifth / 5 - time.monotonic()))
            memory.append(await self.resident())
            print(f"{time.monotonic() - begun:5.0f} s: {memory[-1]:.1f} MiB, {self.compared} equal")
        await asyncio.gather(*clients)
        until = time.monotonic() + 600
        while True:
            load = json.loads(await fetch(self.port, "GET", "/get_load"))[0]
            if load["num_reqs"] == 0 and load["num_tokens"] == 0:
                break
            assert time.monotonic() < until, f"slots are lost: {load}"
            await asyncio.sleep(0.1)
        print(f"{self.compared} texts equal, {self.left} clients left, {self.aborted} aborted")
        middle = statistics.median(self.gaps)
        late = statistics.quantiles(self.gaps, n=100)[98]
        print(f"between pieces: median {middle * 1e3:.1f} ms, p99 {late * 1e3:.1f} ms, {late / middle:.2f} x")
        growth = memory[-1] - memory[0]
        print(f"memory grew by {growth:.1f} MiB between the first fifth and the end")
        return growth


def stream_text(data):
    """The text of a stream whose chunks are still framed."""
    text = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        text += data[:length]
        data = data[length + 2 :]
    events = text.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], events[-2:]
    return "".join(json.loads(e[6:])["choices"][0]["text"] for e in events[:-2])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--growth", type=float, default=16.0, help="MiB that memory may grow")
    parser.add_argument("--clients", type=int, default=64)
    arguments, server_flags = parser.parse_known_args()
    asked = list(wishes())
    expected = offline(arguments.binary, asked)
    # A pool that is full of cached prefixes early, so that it grows no more.
    running = str(arguments.clients)
    flags = ["--port", "0", "--max-running-requests", running, "--max-total-tokens", "4096"]
    command = [arguments.binary, "serve", *flags, *server_flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for line in server.stderr:
            if found := re.search(r"ready: http://[^ ]*:(\d+)/", line):
                break
        # Whatever the server logs must be read, or it would wait.
        threading.Thread(target=server.stderr.read, daemon=True).start()
        soak = Soak(int(found[1]), arguments.clients, asked, expected)
        growth = asyncio.run(soak.run(arguments.seconds))
    finally:
        server.terminate()
        code = server.wait(60)
    raise SystemExit(growth > arguments.growth or code != 0)


if __name__ == "__main__":
    main()
