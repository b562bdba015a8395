"""Prefill and decode workers behind a real router: every text is that of one process.

    python -m pip install sglang-router==0.3.2 openai
    python tests/clients/disaggregation.py target/release/aquila --requests 200 --kill
    python tests/clients/disaggregation.py target/release/aquila --router smg --algorithm NGRAM

Two prefill and two decode workers, a router in front of them, and streamed requests from the openai
package, eight at a time. With --kill one worker of each kind is killed with SIGKILL and started
again, twice. Every request must then get the text that one process gives, a clear error, or, where
the router cuts the stream of a dead worker, a connection error; none may take longer than its
deadline. In the end no worker may hold a slot. With --plain there are two ordinary workers instead,
behind the router's cache-aware policy. With --nixl rows go through NIXL, whose library is named.
Flags after -- go to all workers.
"""

import argparse
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import openai

DEADLINE = 90


def get(port, path, method="GET", host="127.0.0.1"):
    request = urllib.request.Request(f"http://{host}:{port}{path}", method=method)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read()


class Process:
    """A process on a port, which can be killed and started again."""

    def __init__(self, name, command, port, folder, environment=None, host="127.0.0.1"):
        self.name, self.command, self.port, self.host = name, command, port, host
        self.log = os.path.join(folder, name + ".log")
        self.environment = {**os.environ, **(environment or {})}
        self.process = None

    def start(self):
        log = open(self.log, "ab")
        self.process = subprocess.Popen(
            self.command, stdout=log, stderr=log, env=self.environment, start_new_session=True
        )

    def wait_for(self, path, seconds=120):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended:\n{open(self.log).read()[-3000:]}")
            try:
                return get(self.port, path, host=self.host)
            except OSError:
                time.sleep(0.05)
        raise SystemExit(f"{self.name} does not answer:\n{open(self.log).read()[-3000:]}")

    def kill(self):
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def wait_until_idle(workers, seconds=30):
    """Waits until no worker holds a request, a slot, or bytes for another worker."""
    until = time.monotonic() + seconds
    for worker in workers:
        while True:
            get(worker.port, "/flush_cache", "POST", worker.host)
            info = json.loads(get(worker.port, "/server_info", host=worker.host))
            state = info["internal_states"][0]
            held = {key: state[key] for key in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")}
            held |= {name: metric(worker, f"aquila:{name}") for name in ("transfer_rooms", "transfer_unsent_bytes")}
            if not any(held.values()):
                break
            assert time.monotonic() < until, f"{worker.name} still holds {held}"
            time.sleep(0.1)


def metric(worker, name):
    """The sum of a metric of a worker, 0 where it has none."""
    lines = get(worker.port, "/metrics", host=worker.host).decode().splitlines()
    values = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(name + "{")]
    return sum(map(float, values))


def wishes(count):
    for number in range(count):
        body = "\n".join(f"    let v{line} = {line} * {number};" for line in range(number % 24))
        yield {
            "prompt": f"fn number_{number}(a: u32) -> u32 {{\n{body}\n",
            "max_tokens": 8 + number % 40,
            "temperature": 0.0 if number % 2 else 0.8,
            "seed": number,
        }


def ask(port, wish):
    """The text of a streamed answer, or how it failed."""
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=DEADLINE
    )
    began = time.monotonic()
    try:
        chunks = client.completions.create(model="tiny", stream=True, **wish)
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        answer = ("text", text)
    except openai.APIStatusError as error:
        answer = ("error", f"{error.status_code}: {error.message}")
    except openai.APIConnectionError as error:
        answer = ("cut", repr(error.__cause__))
    except openai.APIError as error:
        answer = ("error", error.message)
    except Exception as error:  # a stream that ends in the middle is an error of the client's parts
        answer = ("cut", repr(error))
    return (*answer, time.monotonic() - began)


def router_command(name, ports, prefill, decode):
    module = {"sglang-router": "sglang_router.launch_router", "smg": "smg.launch_router"}[name]
    command = [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(ports)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(ports + 1)]
    command += ["--disable-circuit-breaker"]
    if not prefill:
        urls = [f"http://127.0.0.1:{worker.port}" for worker in decode]
        return [*command, "--policy", "cache_aware", "--worker-urls", *urls]
    command += ["--pd-disaggregation", "--policy", "round_robin"]
    for worker, bootstrap in prefill:
        command += ["--prefill", f"http://127.0.0.1:{worker.port}", str(bootstrap)]
    for worker in decode:
        command += ["--decode", f"http://127.0.0.1:{worker.port}"]
    return command


def nixl_flags(library):
    """The flags with which rows go through NIXL, if its library is given."""
    if library is None:
        return []
    return ["--disaggregation-transfer-backend", "nixl", "--disaggregation-nixl-library", library]


def chaos(workers, stop):
    for kind in range(2):
        for worker in workers[kind::2]:
            if stop.wait(1.5):
                return
            print(f"killing {worker.name}", flush=True)
            worker.kill()
            time.sleep(0.5)
            worker.start()
            worker.wait_for("/health")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--router", default="sglang-router", choices=["sglang-router", "smg"])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--algorithm", default="EAGLE3")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--nixl", metavar="LIBRARY")
    parser.add_argument("--port", type=int, default=8300)
    options, more = parser.parse_known_args()
    folder = tempfile.mkdtemp()
    common = [options.binary, "serve", "tiny", "--threads", "1"]
    common += ["--speculative-algorithm", options.algorithm, *(flag for flag in more if flag != "--")]
    transfer = nixl_flags(options.nixl)

    def worker(name, at, *flags):
        port = options.port + at
        return Process(name, [*common, "--port", str(port), *flags], port, folder)

    one = worker("one", 0)
    prefill, decode = [], []
    for at in range(2):
        if options.plain:
            decode.append(worker(f"worker-{at}", 3 + at))
            continue
        bootstrap = options.port + 20 + at
        flags = ["--disaggregation-mode", "prefill", "--disaggregation-timeout", "10", *transfer]
        flags += ["--disaggregation-bootstrap-port", str(bootstrap)]
        prefill.append((worker(f"prefill-{at}", 1 + at, *flags), bootstrap))
        decode.append(worker(f"decode-{at}", 3 + at, "--disaggregation-mode", "decode", *transfer))
    workers = [*(worker for worker, _ in prefill), *decode]
    port = options.port + 10
    command = router_command(options.router, port, prefill, decode)
    # The router looks for a tokenizer on the hub, which it does not need.
    router = Process("router", command, port, folder, {"HF_ENDPOINT": "http://127.0.0.1:1"})
    try:
        for process in [one, *workers, router]:
            process.start()
        for process in [one, *workers]:
            process.wait_for("/health")
        router.wait_for("/readiness")
        asked = list(wishes(options.requests))
        if options.plain:
            # The second time, a prompt is cached where it went the first time.
            asked = 2 * asked[: options.requests // 2]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            wanted = list(pool.map(lambda wish: ask(one.port, wish), asked))
            assert all(kind == "text" for kind, _, _ in wanted), wanted
            one.kill()
            stop = threading.Event()
            trouble = threading.Thread(target=chaos, args=(workers, stop))
            if options.kill:
                trouble.start()
            got = list(pool.map(lambda wish: ask(port, wish), asked))
            stop.set()
            if options.kill:
                trouble.join()
        counts = {"right": 0, "error": 0, "cut": 0}
        for wish, (_, text, _), (kind, answer, took) in zip(asked, wanted, got):
            assert took < DEADLINE, f"{wish} took {took:.0f} s"
            if kind == "text":
                assert answer == text, f"{wish}\n{answer!r}\nand not\n{text!r}"
                kind = "right"
            else:
                print(f"{kind}: {answer[:200]}")
            counts[kind] += 1
        assert options.kill or counts["right"] == len(asked), counts
        assert counts["right"] > len(asked) / 2, counts
        wait_until_idle(workers)
        slowest = max(took for _, _, took in got)
        for worker in workers if options.plain else []:
            answers, tokens, cached = (
                metric(worker, f"sglang:{name}_total")
                for name in ("num_requests", "prompt_tokens", "cached_tokens")
            )
            log = open(worker.log).read()
            asked_for = [path for path in ("/get_load", "/v1/loads") if f"path={path}" in log]
            print(f"{worker.name}: {answers:.0f} answers, {tokens:.0f} prompt tokens, {cached:.0f} cached; asked for {asked_for}")
        print(f"{options.router}, {options.algorithm}: {counts}, slowest {slowest:.1f} s, no slot is held")
    except BaseException:
        for process in [*workers, router]:
            if os.path.exists(process.log):
                print(f"--- {process.name}\n{open(process.log).read()[-1500:]}")
        raise
    finally:
        for process in [one, *workers, router]:
            process.kill()


if __name__ == "__main__":
    main()
