"""A prefill and a decode worker with a bad network between them.

    python -m pip install openai
    python tests/clients/network.py target/release/aquila
    sudo python tests/clients/network.py target/release/aquila --namespaces

Requests go to both workers as a router sends them: the same body, with the host and port of the
prefill worker and a room. In between is a proxy that delays, drops, cuts, and changes what it
forwards; or, with --namespaces, the workers are in network namespaces of their own (which needs
root), and the link between them is taken down and up. Every request must get the text that one
process gives, or a clear error, within its deadline; afterwards no worker may hold a slot, and all
requests must get their text again. With --nixl rows go through NIXL, whose library is named.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import socket
import subprocess
import tempfile
import threading
import time

from disaggregation import Process, metric, nixl_flags, wait_until_idle, wishes

DEADLINE = 60
KINDS = ["pass", "delay", "slow", "drop", "cut", "refuse", "garble"]


class Proxy:
    """Forwards connections to a port; what becomes of each is drawn from `kinds`."""

    def __init__(self, port, seed):
        self.to, self.kinds, self.open = port, ["pass"], []
        self.chance, self.seen = random.Random(seed), collections.Counter()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def become(self, kinds):
        """What becomes of connections from now on; those that are open end."""
        self.kinds = kinds
        self.cut(len(self.open))

    def cut(self, count):
        for _ in range(count):
            with contextlib.suppress(OSError, ValueError, IndexError):
                self.open.pop(self.chance.randrange(len(self.open))).shutdown(socket.SHUT_RDWR)

    def accept(self):
        while True:
            near, _ = self.listener.accept()
            kind = self.chance.choice(self.kinds)
            # In the handshake, in rows, or behind them, towards either worker.
            limit = self.chance.choice([10, 200, 3_000, 40_000, 200_000, 600_000])
            backward = self.chance.random() < 0.8
            self.seen[kind] += 1
            if kind == "refuse":
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                near.close()
                continue
            self.open.append(near)
            for source, target, struck in ((near, far, not backward), (far, near, backward)):
                arguments = (source, target, kind if struck else "pass", limit)
                threading.Thread(target=self.pump, args=arguments, daemon=True).start()

    def pump(self, source, target, kind, limit):
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                struck = passed + len(data) > limit
                if kind == "delay":
                    time.sleep(0.05)
                elif kind == "slow":
                    time.sleep(len(data) / 500_000)
                elif kind == "drop" and struck:
                    # It is open, and nothing arrives.
                    continue
                elif kind == "cut" and struck:
                    target.sendall(data[: max(0, limit - passed)])
                    break
                elif kind == "garble" and struck and passed <= limit:
                    data = bytearray(data)
                    data[limit - passed] ^= 64
                passed += len(data)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def post(host, port, body):
    """The text of a streamed answer, or how it failed, and how long that took."""
    began = time.monotonic()
    connection = http.client.HTTPConnection(host, port, timeout=DEADLINE)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        data = answer.read().decode()
        if answer.status != 200 or not data.startswith("data:"):
            error = json.loads(data).get("error")
            kind = "error" if error else "text"
            return kind, error and error["message"], time.monotonic() - began
        text, done = "", False
        for line in filter(None, data.split("\n\n")):
            event = line.removeprefix("data: ")
            if event == "[DONE]":
                done = True
                continue
            event = json.loads(event)
            if "error" in event:
                return "error", event["error"]["message"], time.monotonic() - began
            text += "".join(choice["text"] for choice in event["choices"])
        return ("text" if done else "cut"), text, time.monotonic() - began
    finally:
        connection.close()


class Pair:
    """A prefill and a decode worker, and where the latter finds the former."""

    def __init__(self, prefill, decode, host, port):
        self.prefill, self.decode, self.host, self.port = prefill, decode, host, port

    def ask(self, wish):
        room = random.getrandbits(63)
        body = {"model": "tiny", "stream": True, **wish, "bootstrap_host": self.host}
        body |= {"bootstrap_port": self.port, "bootstrap_room": room}
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            first = other.submit(post, self.prefill.host, self.prefill.port, body)
            answer = post(self.decode.host, self.decode.port, body)
            return answer, first.result()

    def ask_all(self, asked, wanted, faultless, name):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            got = list(pool.map(self.ask, asked))
        counts, reasons = collections.Counter(), collections.Counter()
        for wish, text, (answer, first) in zip(asked, wanted, got):
            for kind, said, took in (answer, first):
                assert took < DEADLINE, f"{wish} took {took:.0f} s"
                assert kind in ("text", "error"), f"{wish}: {kind} {said}"
            if answer[0] == "text":
                assert answer[1] == text, f"{wish}\n{answer[1]!r}\nand not\n{text!r}"
                counts["right"] += 1
            else:
                assert answer[1], "an error says why"
                counts["error"] += 1
                reasons["".join("#" if c.isdigit() else c for c in answer[1])] += 1
        slowest = max(took for parts in got for _, _, took in parts)
        assert not faultless or counts["right"] == len(asked), (counts, reasons)
        wait_until_idle([self.prefill, self.decode])
        print(f"{name}: {dict(counts)}, slowest {slowest:.1f} s, no slot is held", flush=True)
        for reason, count in reasons.most_common():
            print(f"    {count} x {reason[:220]}")
        return counts


def by_proxy(pair, proxy, options, asked, wanted):
    for kind in KINDS:
        proxy.become([kind])
        pair.ask_all(asked[:24], wanted, kind in ("pass", "delay", "slow"), f"proxy, {kind}")
    proxy.become(KINDS)
    stop = threading.Event()

    def trouble():
        # Workers keep connections, so those that are good must end for others to begin.
        while not stop.wait(0.3):
            proxy.cut(2)

    thread = threading.Thread(target=trouble)
    thread.start()
    try:
        pair.ask_all(asked, wanted, False, "proxy, all of it")
    finally:
        stop.set()
        thread.join()
    print(f"connections: {dict(proxy.seen)}")
    proxy.become(["pass"])


def by_difference(pair, binary, asked, nixl):
    """Decode workers that differ from the prefill worker are refused, by the name of what differs."""
    same = ["--speculative-algorithm", "EAGLE3"]
    by_tcp = [(same, "the transfer backend is tcp here and nixl there")] if nixl else []
    for flags, what in (
        *by_tcp,
        (["--speculative-algorithm", "NGRAM"], "the algorithm is NGRAM here and EAGLE3 there"),
        ([*same, "--dtype", "float32"], "the dtype is"),
        ([*same, "--kv-cache-dtype", "bfloat16"], "the dtype is"),
    ):
        other = pair.decode
        other.kill()
        role = ["--port", str(other.port), "--disaggregation-mode", "decode"]
        other.command = [binary, "serve", "tiny", "--threads", "1", *flags, *role]
        other.start()
        other.wait_for("/health")
        (kind, said, _), _ = pair.ask(asked[0])
        assert kind == "error" and what in said, f"{kind}: {said}"
        print(f"{' '.join(flags[-2:])}: {said}")
        wait_until_idle([pair.prefill, other])


class Namespaces:
    """Two network namespaces, a link from each to this one, and one between them."""

    def __init__(self):
        self.names = [f"aq{os.getpid()}p", f"aq{os.getpid()}d"]
        self.made = []

    def ip(self, *words):
        subprocess.run(["ip", *words], check=True)

    def __enter__(self):
        first, second = self.names
        for at, name in enumerate(self.names):
            self.ip("netns", "add", name)
            self.made.append(name)
            self.ip("-n", name, "link", "set", "lo", "up")
            here = f"aqc{os.getpid()}{at}"
            self.ip("link", "add", here, "type", "veth", "peer", "name", "client", "netns", name)
            self.ip("addr", "add", f"10.98.{at}.1/24", "dev", here)
            self.ip("link", "set", here, "up")
            self.ip("-n", name, "addr", "add", f"10.98.{at}.2/24", "dev", "client")
            self.ip("-n", name, "link", "set", "client", "up")
        self.ip("-n", first, "link", "add", "data", "type", "veth", "peer", "name", "data", "netns", second)
        for at, name in enumerate(self.names):
            self.ip("-n", name, "addr", "add", f"10.97.0.{at + 1}/24", "dev", "data")
            self.ip("-n", name, "link", "set", "data", "up")
        # What is started before the links are ready would not see them.
        for name in self.names:
            show = ["ip", "-n", name, "-o", "link", "show", "data"]
            while b"state UP" not in subprocess.run(show, check=True, capture_output=True).stdout:
                time.sleep(0.05)
        return self

    def __exit__(self, *_):
        # The links go with them.
        for name in self.made:
            subprocess.run(["ip", "netns", "del", name])

    def set(self, at, state):
        self.ip("-n", self.names[at], "link", "set", "data", state)


def by_link(pair, spaces, options, asked, wanted):
    """The link goes down on one side or the other: the side whose own link is down cannot send at
    all, the other one sends to nobody."""
    pair.ask_all(asked[:16], wanted, True, "link, up")
    for side in (0, 1):
        for down in (1, 4, 14):
            stop = threading.Event()

            def flap():
                while not stop.wait(0.7):
                    spaces.set(side, "down")
                    stop.wait(down)
                    spaces.set(side, "up")

            trouble = threading.Thread(target=flap)
            trouble.start()
            try:
                name = f"link, down for {down} s on the side of {('prefill', 'decode')[side]}"
                pair.ask_all(asked, wanted, False, name)
            finally:
                stop.set()
                trouble.join()
                spaces.set(side, "up")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--namespaces", action="store_true")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--algorithm", default="EAGLE3")
    parser.add_argument("--port", type=int, default=8400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nixl", metavar="LIBRARY")
    options = parser.parse_args()
    folder = tempfile.mkdtemp()
    common = [options.binary, "serve", "tiny", "--threads", "1"]
    common += ["--speculative-algorithm", options.algorithm]
    bootstrap = options.port + 20
    secret = os.path.join(folder, "secret")
    with open(secret, "w") as file:
        file.write("only these two know it\n")
    asked = list(wishes(options.requests))
    random.seed(options.seed)
    processes = []

    def worker(name, at, flags, host="127.0.0.1", inside=()):
        port = options.port + at
        command = [*inside, *common, "--port", str(port), *flags]
        # NIXL's UCX would choose among the networks by itself.
        environment = {"UCX_NET_DEVICES": "data"} if inside else {}
        processes.append(Process(name, command, port, folder, environment, host))
        return processes[-1]

    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [process.kill() for process in processes])
        prefill = ["--disaggregation-mode", "prefill", "--disaggregation-timeout", "10"]
        prefill += ["--disaggregation-bootstrap-port", str(bootstrap)]
        decode = ["--disaggregation-mode", "decode", *nixl_flags(options.nixl)]
        prefill += nixl_flags(options.nixl)
        places, spaces = [("127.0.0.1", ()), ("127.0.0.1", ())], None
        if options.namespaces:
            spaces = stack.enter_context(Namespaces())
            inside = [("ip", "netns", "exec", name) for name in spaces.names]
            places = [("10.98.0.2", inside[0]), ("10.98.1.2", inside[1])]
            shared = ["--host", "0.0.0.0", "--disaggregation-secret-file", secret]
            prefill += [*shared, "--disaggregation-bootstrap-host", "10.97.0.1"]
            decode += shared
        one = worker("one", 0, [])
        workers = [worker("prefill", 1, prefill, *places[0]), worker("decode", 2, decode, *places[1])]
        for process in processes:
            process.start()
        for process in processes:
            process.wait_for("/health")
        bodies = [{"model": "tiny", "stream": True, **wish} for wish in asked]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            wanted = list(pool.map(lambda body: post("127.0.0.1", one.port, body), bodies))
        assert all(kind == "text" for kind, _, _ in wanted), wanted
        wanted = [text for _, text, _ in wanted]
        one.kill()
        try:
            if spaces:
                pair = Pair(*workers, "10.97.0.1", bootstrap)
                by_link(pair, spaces, options, asked, wanted)
            else:
                proxy = Proxy(bootstrap, options.seed)
                pair = Pair(*workers, "127.0.0.1", proxy.port)
                by_proxy(pair, proxy, options, asked, wanted)
            # Connections that broke unnoticed may cost the first requests; then all is well again.
            pair.ask_all(asked[:8], wanted, False, "afterwards, the first")
            pair.ask_all(asked, wanted, True, "afterwards")
        except BaseException:
            for process in workers:
                print(f"--- {process.name}\n{open(process.log).read()[-3000:]}")
            raise
        for process in workers:
            failed = metric(process, "aquila:transfer_failures_total")
            done, strangers = metric(process, "aquila:transfers_total"), metric(process, "aquila:transfer_strangers_total")
            print(f"{process.name}: {done:.0f} transfers, {failed:.0f} failed, {strangers:.0f} strangers")
        if not spaces and options.algorithm == "EAGLE3":
            by_difference(pair, options.binary, asked, options.nixl)


if __name__ == "__main__":
    main()
