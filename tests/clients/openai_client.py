"""The openai package against a running server: what its users rely on.

    python3 -m venv VENV && VENV/bin/pip install -r tests/clients/requirements.txt
    VENV/bin/python tests/clients/openai_client.py target/release/aquila

Starts the server on a free port, runs every check and ends it with SIGTERM. Exit code 0 if all
went well.
"""

import asyncio
import re
import subprocess
import sys
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


def wait_until_idle(client):
    until = time.monotonic() + 600
    while time.monotonic() < until:
        load = client.get("../get_load", cast_to=object)
        if load[0]["num_reqs"] == 0 and load[0]["num_tokens"] == 0:
            return
        time.sleep(0.05)
    raise AssertionError(f"slots are still held: {load}")


def main(binary):
    flags = ["--port", "0", "--api-key", KEY]
    server = subprocess.Popen([binary, "serve", *flags], stderr=subprocess.PIPE, text=True)
    failed = 0
    try:
        url = None
        for line in server.stderr:
            if found := re.search(r"ready: (http://\S+)", line):
                url = found[1]
                break
        assert url, "the server did not start"
        client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=120)
        for function in CHECKS:
            try:
                function(client)
                print(f"ok      {function.__name__}")
            except Exception:
                failed += 1
                print(f"FAILED  {function.__name__}")
                traceback.print_exc()
    finally:
        server.terminate()
        code = server.wait(60)
    print(f"{len(CHECKS) - failed} of {len(CHECKS)} checks passed; the server ended with {code}")
    return failed > 0 or code != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
