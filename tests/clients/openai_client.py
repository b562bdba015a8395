"""The openai package against a running server: what its users rely on.

    python3 -m venv VENV && VENV/bin/pip install -r tests/clients/requirements.txt
    VENV/bin/python tests/clients/openai_client.py target/release/aquila

Starts the server on a free port, runs every check and ends it with SIGTERM; then once more with
TLS and keys from a file. Exit code 0 if all went well. The certificate is made with openssl.
"""

import asyncio
import re
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import traceback

import openai

KEY = "a-key"
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def ask(client, text="Tom has 3 apples and buys 4 more. How many?", **options):
    options = {"max_tokens": 24, "temperature": 0, **options}
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="tiny", messages=messages, **options)


@check
def models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


@check
def a_chat_is_answered(client):
    answer = ask(client)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0
    assert answer._request_id == answer.id


@check
def a_conversation_goes_on(client):
    messages = [
        {"role": "system", "content": "You count."},
        {"role": "user", "content": [{"type": "text", "text": "One."}]},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three."},
    ]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=5, user="me", metadata={"a": "b"}
    )
    assert answer.usage.completion_tokens <= 5


@check
def a_stream_joins_to_the_whole(client):
    whole = ask(client).choices[0].message.content
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == whole
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens > 0


@check
def the_stream_helper_accumulates(client):
    # The helper refuses texts that were cut at their longest, so this one ends at a stop.
    whole = ask(client).choices[0].message.content
    messages = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many?"}]
    with client.chat.completions.stream(
        model="tiny", messages=messages, stop=whole[9:12], temperature=0
    ) as stream:
        for _ in stream:
            pass
        text = stream.get_final_completion().choices[0].message.content
    assert text == whole[: whole.index(whole[9:12])]


@check
def log_probabilities_spell_the_text(client):
    choice = ask(client, logprobs=True, top_logprobs=2).choices[0]
    tokens = choice.logprobs.content
    assert b"".join(bytes(t.bytes) for t in tokens).decode() == choice.message.content
    assert all(len(t.top_logprobs) == 2 and t.logprob <= 0 for t in tokens)
    chunks = ask(client, logprobs=True, top_logprobs=2, stream=True)
    streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert streamed == tokens


@check
def several_choices_and_seeds(client):
    options = {"n": 3, "seed": 5, "temperature": 1.0}
    first, second = (ask(client, **options) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in second.choices]
    streamed = ["", "", ""]
    for chunk in ask(client, stream=True, **options):
        choice = chunk.choices[0]
        streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


@check
def stops_end_a_text(client):
    whole = ask(client).choices[0].message.content
    stop = whole[5:8]
    choice = ask(client, stop=stop).choices[0]
    assert choice.message.content == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"
    assert ask(client, stop=[stop, "zzz"]).choices[0].message.content == choice.message.content


@check
def completions_with_echo_and_log_probabilities(client):
    options = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    answer = client.completions.create(prompt=["fn main", "use std"], **options)
    assert [choice.index for choice in answer.choices] == [0, 1]
    plain = answer.choices[0].text
    echoed = client.completions.create(prompt="fn main", echo=True, logprobs=1, **options)
    choice = echoed.choices[0]
    assert choice.text == "fn main" + plain
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs[0] is None
    chunks = client.completions.create(prompt="fn main", stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain


@check
def errors_have_their_types(client):
    def refused(kind, status, param=None, code=None, **options):
        try:
            ask(client, **options)
        except kind as error:
            assert error.status_code == status, error
            assert error.param == param and (code is None or error.code == code), error.body
        else:
            raise AssertionError(f"{options} was accepted")

    refused(openai.BadRequestError, 400, "temperature", temperature=-1)
    refused(openai.BadRequestError, 400, "n", n=0)
    refused(openai.BadRequestError, 400, "messages", "context_length_exceeded", text="a b " * 5000)
    try:
        client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "x"}])
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("an unknown model was accepted")
    try:
        ask(client.with_options(api_key="wrong"))
    except openai.AuthenticationError as error:
        assert error.status_code == 401
    else:
        raise AssertionError("a wrong key was accepted")


@check
def a_timeout_frees_the_server(client):
    impatient = client.with_options(timeout=0.3, max_retries=0)
    try:
        ask(impatient, max_tokens=1900, n=40, extra_body={"ignore_eos": True})
    except openai.APITimeoutError:
        pass
    else:
        raise AssertionError("40 long answers came in a third of a second")
    wait_until_idle(client)


@check
def a_stream_may_be_left(client):
    stream = ask(client, stream=True, max_tokens=1900, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    wait_until_idle(client)


@check
def clients_may_be_asynchronous(client):
    async def run():
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=KEY) as many:
            async def text(i):
                parts = []
                async for chunk in await ask(many, f"Count to {i}", stream=True):
                    parts.append(chunk.choices[0].delta.content or "")
                return "".join(parts)

            return await asyncio.gather(*(text(i) for i in range(16)))

    alone = [ask(client, f"Count to {i}").choices[0].message.content for i in range(16)]
    assert asyncio.run(run()) == alone


def answers_come_over_tls(client):
    whole = ask(client).choices[0].message.content
    chunks = list(ask(client, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole
    answer = client.models.with_raw_response.list(extra_headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine"


def certificates_are_checked(client):
    stranger = openai.OpenAI(base_url=client.base_url, api_key="sk-1", max_retries=0)
    try:
        stranger.models.list()
    except openai.APIConnectionError as error:
        assert "certificate" in str(error.__cause__).lower(), error.__cause__
    else:
        raise AssertionError("a certificate that nobody signed was trusted")


def keys_have_their_share(client):
    stream = ask(client, stream=True, max_tokens=1900, extra_body={"ignore_eos": True})
    next(iter(stream))
    try:
        ask(client)
    except openai.RateLimitError as error:
        assert error.status_code == 429 and error.code == "rate_limit_exceeded", error.body
        assert int(error.response.headers["retry-after"]) >= 1 and error.request_id
    else:
        raise AssertionError("a second request of the key was taken")
    ask(client.with_options(api_key="sk-2"), max_tokens=1)
    stream.close()
    wait_until_idle(client)
    ask(client, max_tokens=1)
    try:
        client.with_options(api_key="sk-3").models.list()
    except openai.AuthenticationError as error:
        assert error.code == "invalid_api_key"
    else:
        raise AssertionError("a wrong key was accepted")


SECURE_CHECKS = [answers_come_over_tls, certificates_are_checked, keys_have_their_share]


def wait_until_idle(client):
    until = time.monotonic() + 600
    while time.monotonic() < until:
        load = client.get("../get_load", cast_to=object)
        if load[0]["num_reqs"] == 0 and load[0]["num_tokens"] == 0:
            return
        time.sleep(0.05)
    raise AssertionError(f"slots are still held: {load}")


def main(binary):
    flags = ["--api-key", KEY]
    with Server(binary, flags) as server:
        client = openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=120)
        failed = run(CHECKS, client)
    with tempfile.TemporaryDirectory() as folder, secure_server(binary, folder) as secure:
        trust = ssl.create_default_context(cafile=f"{folder}/cert.pem")
        trusting = openai.DefaultHttpxClient(verify=trust)
        options = {"base_url": secure.url, "max_retries": 0, "timeout": 120}
        client = openai.OpenAI(api_key="sk-1", http_client=trusting, **options)
        failed += run(SECURE_CHECKS, client)
    count = len(CHECKS) + len(SECURE_CHECKS)
    codes = server.code, secure.code
    print(f"{count - failed} of {count} checks passed; the servers ended with {codes}")
    return failed > 0 or codes != (0, 0)


class Server:
    """A server on a free port, which drains at the end."""

    def __init__(self, binary, flags):
        command = [binary, "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def __enter__(self):
        for line in self.process.stderr:
            if found := re.search(r"ready: (https?://\S+)", line):
                self.url = found[1]
                # The log is read, as it is by whoever keeps it.
                threading.Thread(target=self.process.stderr.read, daemon=True).start()
                return self
        raise AssertionError("the server did not start")

    def __exit__(self, *_):
        self.process.terminate()
        self.code = self.process.wait(60)


def secure_server(binary, folder):
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName = DNS:localhost, IP:127.0.0.1"]
    files = ["-keyout", f"{folder}/key.pem", "-out", f"{folder}/cert.pem"]
    subprocess.run([*command.split(), *names, *files], check=True, stderr=subprocess.DEVNULL)
    with open(f"{folder}/keys", "w") as file:
        file.write("sk-1 alice\nsk-2 bob\n")
    flags = ["--ssl-certfile", f"{folder}/cert.pem", "--ssl-keyfile", f"{folder}/key.pem"]
    flags += ["--api-key-file", f"{folder}/keys", "--max-requests-per-key", "1"]
    return Server(binary, flags)


def run(checks, client):
    failed = 0
    for function in checks:
        try:
            function(client)
            print(f"ok      {function.__name__}")
        except Exception:
            failed += 1
            print(f"FAILED  {function.__name__}")
            traceback.print_exc()
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
