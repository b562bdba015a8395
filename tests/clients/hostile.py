#!/usr/bin/env python3
"""Clients that want a server to fail, against a real binary; Python's standard library alone.

    hostile.py BINARY [--connections N] [flags of `aquila serve`]

Each attack runs beside normal requests. The verdict: every normal request is answered, the
server's memory stays within 1.2 times what its start announced, and two SIGTERMs end it while
requests are under way. Times are told, not judged.
"""

import argparse
import http.client
import json
import os
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

MIB = 1 << 20
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30}
NORMAL = {"prompt": "fn main", "max_tokens": 8, "temperature": 0}


class Server:
    def __init__(self, binary, folder, flags):
        command = [binary, "serve", "tiny", "--port", "0", "--speculative-algorithm", "NGRAM"]
        command += ["--max-queued-requests", "256", "--max-returned-bytes", str(MIB)]
        command += ["--max-grammar-bytes", str(MIB)]
        command += ["--external-corpus-folder", folder, *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.budget = 0
        for line in self.process.stderr:
            size = re.match(r"(?:total|requests) +([\d.]+) (\w+)", line)
            if size:
                self.budget += float(size[1]) * UNITS[size[2]]
            ready = re.search(r"ready: http://127\.0\.0\.1:(\d+)", line)
            if ready:
                self.port = int(ready[1])
                break
        else:
            sys.exit("the server did not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def memory(self, name):
        with open(f"/proc/{self.process.pid}/status") as status:
            return int(re.search(rf"{name}:\s+(\d+)", status.read())[1]) * 1024

    def post(self, path, body, timeout=600):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def socket(self, data=b""):
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=600)
        connection.sendall(data)
        return connection

    def load(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("GET", "/get_load")
        load = json.load(connection.getresponse())[0]["num_reqs"]
        connection.close()
        return load

    def normal(self):
        """Seconds of a normal request, which must be answered."""
        begun = time.monotonic()
        status, body = self.post("/v1/completions", NORMAL)
        assert status == 200, (status, body)
        return time.monotonic() - begun


def upload(length, path="/v1/completions"):
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


def at_once(count, work):
    """What `count` threads return."""
    results = [None] * count

    def run(index):
        results[index] = work(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def big_bodies(server):
    """Sixteen bodies of 8 MB at once, of each kind and to each route that reads long ones."""
    size = 8 * MIB - 1000
    words, chars = "word " * (size // 5), "a1!?" * (size // 4)
    ids = "[" + "1," * (size // 2 - 50) + "1]"
    values = "[" + "{}," * (size // 3 - 50) + "1]"
    chat = {"messages": [{"role": "user", "content": words}]}
    kinds = [
        ("/v1/completions", json.dumps({"prompt": words})),
        ("/v1/completions", json.dumps({"prompt": chars})),
        ("/v1/completions", json.dumps({"prompt": ["word " * 20_000] * 80})),
        ("/v1/completions", json.dumps({"prompt": ["a"] * 1_000_000})),
        ("/v1/completions", f'{{"prompt": {ids}}}'),
        ("/v1/chat/completions", json.dumps(chat)),
        ("/v1/chat/completions", f'{{"messages": [], "chat_template_kwargs": {{"a": {values}}}}}'),
        ("/generate", json.dumps({"text": [chars[: size // 4]] * 4})),
        ("/generate", f'{{"input_ids": {ids}}}'),
        ("/tokenize", json.dumps({"prompt": words})),
        ("/detokenize", f'{{"tokens": {ids}}}'),
        ("/add_external_corpus", json.dumps({"documents": [words]})),
        ("/abort_request", f'{{"rid": {values}}}'),
    ]
    seen = set()
    for path, body in kinds:
        body = body.encode()
        for status, answer in at_once(16, lambda _: server.post(path, body)):
            corpus = path in ("/add_external_corpus", "/detokenize") and status == 200
            assert status in (400, 503) or corpus, (path, status, answer[:300])
            seen.add(status)
    return f"statuses {sorted(seen)}"


def connections(server, count):
    """So many connections that say nothing."""
    open_ones = [server.socket() for _ in range(count)]
    server.normal()
    alive = 0
    for connection in open_ones:
        connection.setblocking(False)
        try:
            alive += connection.recv(1) != b""
        except BlockingIOError:
            alive += 1
        except OSError:
            pass
        connection.close()
    return f"{alive} of {count} still open at the end"


def slow_loris(server):
    """Headers and bodies that come byte by byte."""
    heads = [server.socket(b"POST /generate HT") for _ in range(500)]
    bodies = [server.socket(upload(8_000_000) + b"{") for _ in range(500)]
    for _ in range(20):
        for connection in heads + bodies:
            try:
                connection.send(b" ")
            except OSError:
                pass
        server.normal()
    for connection in heads + bodies:
        connection.close()


def half_open(server):
    """Clients that close one direction in the middle of something."""
    for data in (b"", b"GET /hea", upload(100) + b"{", upload(8_000_000)):
        sockets = [server.socket(data) for _ in range(100)]
        for connection in sockets:
            connection.shutdown(socket.SHUT_WR)
        server.normal()
        for connection in sockets:
            connection.close()


def past_the_queue(server):
    """More requests than may wait; whoever is refused hears 503."""
    body = {"prompt": ["fn main"] * 100, "max_tokens": 2}
    statuses = [status for status, _ in at_once(16, lambda _: server.post("/v1/completions", body))]
    assert set(statuses) <= {200, 503}, statuses
    return f"{statuses.count(503)} of {len(statuses)} refused"


def aborted_uploads(server):
    """Bodies whose clients leave in the middle."""
    part = b'{"prompt": "' + b"a" * (4 * MIB)
    at_once(64, lambda _: server.socket(upload(8_000_000) + part).close())


def broken_json(server):
    """Deep, invalid and endless JSON."""
    bodies = [
        b"[" * (8 * MIB - 1),
        b'{"a":' * (MIB),
        b'{"prompt": "' + b"\xff" * MIB + b'"}',
        b'{"prompt": "' + b"\\ud800" * MIB + b'"}',
        b'{"prompt": ' + b"[" * MIB,
        b"{" + b",".join(b'"%d":1' % n for n in range(MIB // 2)) + b"}",
    ]
    for body in bodies:
        for status, answer in at_once(8, lambda _: server.post("/v1/completions", body)):
            assert status in (400, 503), (status, answer[:300])


def files(server, folder):
    """Pipes, devices and files of others as corpora."""
    os.mkfifo(os.path.join(folder, "fifo"))
    os.symlink("/dev/zero", os.path.join(folder, "zero"))
    os.symlink("/etc/passwd", os.path.join(folder, "out"))
    paths = ["fifo", "zero", "out", "/dev/zero", "/etc/shadow", "/etc/passwd", "../x", "/dev/stdin"]
    for path in paths * 4:
        status, answer = server.post("/add_external_corpus", {"file_path": path}, timeout=60)
        assert status == 400, (path, status, answer)


def two_signals(server):
    """Two SIGTERMs, with requests, uploads and connections under way."""
    long = json.dumps({"prompt": ["fn main"] * 200, "max_tokens": 2000, "ignore_eos": True}).encode()
    held = [server.socket(upload(len(long)) + long), server.socket(upload(8_000_000) + b"{")]
    held += [server.socket() for _ in range(100)]
    while server.load() == 0:
        time.sleep(0.01)
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    # Two signals that come too soon after each other are one.
    time.sleep(1)
    assert server.process.poll() is None, "the server did not finish what was under way"
    server.process.send_signal(signal.SIGTERM)
    code = server.process.wait(timeout=60)
    assert code == 1, code
    for connection in held:
        connection.close()
    return f"ended {time.monotonic() - begun - 1:.2f} s after the second"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--connections", type=int, default=10_000)
    arguments, flags = parser.parse_known_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    folder = tempfile.mkdtemp()
    server = Server(arguments.binary, folder, flags)
    alone = [server.normal() for _ in range(20)]
    start = server.memory("VmHWM")
    print(f"budget {server.budget / MIB:.0f} MiB, at start {start / MIB:.0f} MiB; a normal request")
    print(f"  alone: median {statistics.median(alone):.3f} s, slowest {max(alone):.3f} s")
    attacks = [
        ("16 bodies of 8 MB", lambda: big_bodies(server)),
        (f"{arguments.connections} connections", lambda: connections(server, arguments.connections)),
        ("slow loris", lambda: slow_loris(server)),
        ("half-open sockets", lambda: half_open(server)),
        ("aborted uploads", lambda: aborted_uploads(server)),
        ("deep and broken JSON", lambda: broken_json(server)),
        ("files as corpora", lambda: files(server, folder)),
        ("past the queue", lambda: past_the_queue(server)),
    ]
    for name, attack in attacks:
        result, beside, over = [], [], threading.Event()

        def run():
            try:
                result.append(attack())
            except BaseException as error:
                result.append(error)
            over.set()

        thread = threading.Thread(target=run)
        thread.start()
        while not over.is_set():
            # A queue that the attack fills is full for others, too.
            if name != "past the queue":
                beside.append(server.normal())
            over.wait(0.05)
        thread.join()
        if isinstance(result[0], BaseException):
            server.process.kill()
            raise result[0]
        peak = server.memory("VmHWM")
        times = ""
        if beside:
            median, slowest = statistics.median(beside), max(beside)
            times = f"beside it median {median:.3f} s, slowest {slowest:.3f} s of {len(beside)}; "
        print(f"  {name}: {times}peak {peak / MIB:.0f} MiB; {result[0] or ''}", flush=True)
        assert peak <= 1.2 * server.budget, f"{peak / MIB:.0f} MiB are above the budget"
    server.normal()
    print(f"  two SIGTERMs: {two_signals(server)}")
    print("all normal requests were answered, within the memory that the start announced")


if __name__ == "__main__":
    main()
