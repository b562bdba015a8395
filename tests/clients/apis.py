"""Clients of OpenAI's and Anthropic's APIs against a running server: tools, structured output,
responses and messages.

    python3 -m venv VENV && VENV/bin/pip install -r tests/clients/requirements-apis.txt
    VENV/bin/python tests/clients/apis.py target/release/aquila

Runs every check twice, against a server that drafts and against one that does not, and compares what
the checks return. Then llm-comply, for the three APIs. Exit code 0 if all went well. The shipped
model is small, so tools are forced and formats are held by grammars.
"""

import json
import os
import subprocess
import sys
import traceback
from typing import Literal

import anthropic
import instructor
import litellm
import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai_client import Server
from pydantic import BaseModel, Field

KEY = "a-key"
CHECKS = []
QUESTION = "Tom has 3 apples and buys 4 more. How many?"
# The newest versions of the package have no argument for it.
GREEDY = {"extra_body": {"temperature": 0}}
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


class Apples(BaseModel):
    """How many apples there are."""

    count: int = Field(ge=0, le=99)
    kind: Literal["red", "green"]


def check(function):
    CHECKS.append(function)
    return function


class Clients:
    """One client of each package."""

    def __init__(self, url):
        self.url = url
        options = {"api_key": KEY, "max_retries": 0, "timeout": 120}
        self.openai = openai.OpenAI(base_url=url, **options)
        self.anthropic = anthropic.Anthropic(base_url=url.removesuffix("/v1"), **options)
        self.langchain = ChatOpenAI(model="tiny", base_url=url, temperature=0, **options)


def messages():
    return [{"role": "user", "content": QUESTION}]


def add_tool():
    return {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


@check
def openai_tools_are_called(clients):
    create = clients.openai.chat.completions.create
    options = {"model": "tiny", "messages": messages(), "temperature": 0, "max_tokens": 100}
    named = {"type": "function", "function": {"name": "add"}}
    options |= {"tools": [add_tool()], "tool_choice": named}
    choice = create(**options).choices[0]
    call = choice.message.tool_calls[0]
    assert choice.finish_reason == "tool_calls" and call.function.name == "add"
    name, arguments = "", ""
    for chunk in create(stream=True, **options):
        for piece in chunk.choices[0].delta.tool_calls or []:
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
    assert (name, arguments) == ("add", call.function.arguments)
    assert set(json.loads(arguments)) == {"a", "b"}
    history = messages() + [choice.message.model_dump(exclude_none=True)]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
    after = create(model="tiny", messages=history, tools=[add_tool()], temperature=0, max_tokens=8)
    return arguments, after.choices[0].message.content


@check
def openai_formats_are_parsed(clients):
    answer = clients.openai.chat.completions.parse(
        model="tiny", messages=messages(), response_format=Apples, temperature=0, max_tokens=100
    )
    apples = answer.choices[0].message.parsed
    assert isinstance(apples, Apples)
    return apples.model_dump()


@check
def openai_log_probabilities_count_as_tokens(clients):
    answer = clients.openai.chat.completions.create(
        model="tiny", messages=messages(), tools=[add_tool()], tool_choice="required",
        parallel_tool_calls=False, logprobs=True, temperature=0, max_tokens=100,
    )
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens
    return [(token.token, token.logprob) for token in tokens]


@check
def openai_responses_are_answered(clients):
    create = clients.openai.responses.create
    options = {"model": "tiny", "input": QUESTION, "temperature": 0, "max_output_tokens": 16}
    whole = create(**options)
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    events = list(create(stream=True, **options))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text and events[0].type == "response.created"
    assert events[-1].response.output_text == text
    return text


@check
def openai_responses_call_tools(clients):
    function = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
    options = {"model": "tiny", "tools": [function], "temperature": 0, "max_output_tokens": 100}
    response = clients.openai.responses.create(
        input=QUESTION, tool_choice={"type": "function", "name": "add"}, **options
    )
    call = response.output[0]
    assert response.status == "completed" and call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    history = [*messages(), call.model_dump(), result]
    after = clients.openai.responses.create(input=history, **options | {"max_output_tokens": 8})
    parsed = clients.openai.responses.parse(
        model="tiny", input=QUESTION, text_format=Apples, temperature=0, max_output_tokens=100
    )
    return call.arguments, after.output_text, parsed.output_parsed.model_dump()


@check
def anthropic_messages_are_answered(clients):
    client = clients.anthropic
    options = {"model": "tiny", "messages": messages(), "system": "Be brief.", **GREEDY}
    whole = client.messages.create(max_tokens=16, **options)
    assert whole.usage.output_tokens <= 16
    with client.messages.stream(max_tokens=16, **options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text and final.stop_reason == whole.stop_reason
    assert final.usage == whole.usage
    count = client.messages.count_tokens(
        model="tiny", messages=messages(), system="Be brief."
    )
    assert count.input_tokens == whole.usage.input_tokens
    return text


@check
def anthropic_tools_are_called(clients):
    function = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
    options = {"model": "tiny", "tools": [function], "max_tokens": 100, **GREEDY}
    choice = {"type": "tool", "name": "add"}
    create = clients.anthropic.messages.create
    whole = create(messages=messages(), tool_choice=choice, **options)
    call = whole.content[0]
    assert whole.stop_reason == "tool_use" and call.type == "tool_use"
    with clients.anthropic.messages.stream(
        messages=messages(), tool_choice=choice, **options
    ) as stream:
        assert stream.get_final_message().content[0].input == call.input
    history = messages() + [{"role": "assistant", "content": [call.model_dump()]}]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "7"}
    history.append({"role": "user", "content": [result]})
    after = create(messages=history, **options | {"max_tokens": 8})
    return call.input, after.content[0].text


@check
def anthropic_errors_have_their_types(clients):
    create = clients.anthropic.messages.create
    try:
        create(model="tiny", messages=[], max_tokens=5)
    except anthropic.BadRequestError as error:
        assert error.body["error"]["type"] == "invalid_request_error", error.body
    else:
        raise AssertionError("an empty conversation was accepted")
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}
    try:
        create(model="tiny", messages=[{"role": "user", "content": [image]}], max_tokens=5)
    except anthropic.BadRequestError as error:
        assert "`image`" in error.body["error"]["message"], error.body
    else:
        raise AssertionError("an image was accepted")
    try:
        wrong = clients.anthropic.with_options(api_key="wrong")
        wrong.messages.create(model="tiny", messages=messages(), max_tokens=5)
    except anthropic.AuthenticationError as error:
        assert error.body["error"]["type"] == "authentication_error", error.body
    else:
        raise AssertionError("a wrong key was accepted")


@tool
def pick(kind: Literal["red", "green"]) -> str:
    """Pick an apple."""
    return f"one {kind} apple"


@check
def langchain_tools_are_called(clients):
    model = clients.langchain.bind(max_tokens=100)
    bound = clients.langchain.bind_tools([pick], tool_choice="pick").bind(max_tokens=100)
    asked = HumanMessage(QUESTION)
    message = bound.invoke([asked])
    call = message.tool_calls[0]
    assert call["name"] == "pick" and call["args"]["kind"] in ("red", "green")
    whole = None
    for chunk in bound.stream([asked]):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"] == call["args"]
    result = ToolMessage(pick.invoke(call["args"]), tool_call_id=call["id"])
    after = model.bind(max_tokens=8).invoke([asked, message, result])
    return call["args"], after.content


@check
def langchain_output_is_structured(clients):
    found = {}
    for method in ("json_schema", "function_calling"):
        model = clients.langchain.model_copy(update={"max_tokens": 100})
        apples = model.with_structured_output(Apples, method=method).invoke(QUESTION)
        assert isinstance(apples, Apples)
        found[method] = apples.model_dump()
    return found


@check
def litellm_speaks_every_api(clients):
    options = {"messages": messages(), "api_key": KEY, "temperature": 0, "max_tokens": 60}
    named = {"type": "function", "function": {"name": "add"}}
    options |= {"tools": [add_tool()], "tool_choice": named}
    found = {}
    for model, base in (("openai/tiny", clients.url), ("anthropic/tiny", clients.url[:-3])):
        answer = litellm.completion(model=model, api_base=base, **options)
        call = answer.choices[0].message.tool_calls[0]
        assert call.function.name == "add"
        found[model] = json.loads(call.function.arguments)
        assert answer.usage.total_tokens > 0
    response = litellm.responses(
        model="openai/tiny", input=QUESTION, api_base=clients.url, api_key=KEY, temperature=0,
        max_output_tokens=8,
    )
    found["responses"] = response.output[0].content[0].text
    return found


@check
def instructor_models_are_filled(clients):
    found = {}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(clients.openai, mode=mode)
        apples = client.chat.completions.create(
            model="tiny", messages=messages(), response_model=Apples, max_retries=0,
            temperature=0, max_tokens=100,
        )
        assert isinstance(apples, Apples)
        found[str(mode)] = apples.model_dump()
    return found


# What llm-comply checks and is not so here: images are refused, and a model need not be named.
LEFT_OUT = {
    "image-input",
    "chat-image-input",
    "anth-image-input",
    "error-handling",
    "chat-error-handling",
}


def comply(url):
    failed = 0
    for api in ("openai-chat", "open-responses", "anthropic"):
        command = [sys.executable, "-m", "llm_comply.cli", "--format", api, "--json"]
        command += ["-u", url, "-k", KEY, "-m", "tiny", "--timeout", "300"]
        ran = subprocess.run(command, capture_output=True, text=True)
        report = json.loads(ran.stdout)
        for result in report["results"]:
            name, status = result["id"], result["status"]
            if status in ("passed", "skipped"):
                print(f"ok      {api} {name} {status}")
            elif name in LEFT_OUT:
                print(f"left    {api} {name}")
            else:
                failed += 1
                print(f"FAILED  {api} {name}: {result}")
    return failed


def run(clients):
    found, failed = {}, 0
    for function in CHECKS:
        try:
            found[function.__name__] = function(clients)
            print(f"ok      {function.__name__}")
        except Exception:
            failed += 1
            print(f"FAILED  {function.__name__}")
            traceback.print_exc()
    return found, failed


def main(binary):
    os.environ["LITELLM_LOG"] = "ERROR"
    results, failed = {}, 0
    for name, flags in (("drafts", []), ("plain", ["--speculative-algorithm", "none"])):
        print(f"{name}:")
        with Server(binary, ["--api-key", KEY, *flags]) as server:
            results[name], failures = run(Clients(server.url))
            failed += failures + comply(server.url)
        failed += server.code != 0
    for check_name, found in results["drafts"].items():
        if found != results["plain"].get(check_name):
            failed += 1
            print(f"FAILED  {check_name}: {found} with drafts, {results['plain'].get(check_name)}")
    print(f"{failed} failures")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
