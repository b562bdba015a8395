"""Writes tests/fixtures/chat/expected.json: what Jinja2 makes of the templates beside it.

The environment is the one that transformers builds for chat templates: an immutable sandbox with
trimmed blocks, loop controls, the `generation` tag, and `tojson`, `raise_exception` and
`strftime_now` of its own. The clock stands still.

    pip install jinja2 && python crates/aquila-text/tests/reference/render.py
"""

import json
import pathlib
from datetime import datetime

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock
from jinja2.sandbox import ImmutableSandboxedEnvironment

CHAT = pathlib.Path(__file__).parent.parent / "fixtures" / "chat"
# 1770281045 seconds after 1970.
NOW = datetime(2026, 2, 5, 8, 44, 5)


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    return env


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a place – now & here",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "Ort, z.B. \"Zürich\""},
                "days": {"type": "array", "items": {"type": "integer"}, "default": []},
                "scale": {"type": "number", "minimum": 1e-05, "maximum": 1e22, "default": 1.0},
            },
            "required": ["place"],
        },
        "return": {"type": "string"},
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "description": "时间", "parameters": {"type": "object", "properties": {}}},
}


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def call(name, arguments, id="abcdef012"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


HELLO = [turn("user", "Hello there")]
TALK = [
    turn("system", "  Be brief.\n"),
    turn("user", "Who are you?"),
    turn("assistant", "\n I am a test.  "),
    turn("user", "Grüße, 世界 🌍 <b>&\"quotes\"</b>"),
]
TOOL_TALK = [
    turn("system", "Use tools."),
    turn("user", "Weather in Zürich?"),
    turn("assistant", "", tool_calls=[call("get_weather", {"place": "Zürich", "days": [1, 2]})]),
    turn("tool", '{"sky": "grey"}', tool_call_id="abcdef012"),
    turn("assistant", "Grey."),
    turn("user", "And tomorrow?"),
]
THINKING = [
    turn("user", "1+1?"),
    turn("assistant", "<think>\none and one\n</think>\n\n2"),
    turn("user", "2+2?"),
    turn("assistant", "<think>\ntwo and two\n</think>\n\nLet me ask.", tool_calls=[
        call("clock", {}), call("get_weather", '{"place": "X"}'),
    ]),
    turn("tool", "12:00"),
    turn("tool", "fine"),
    turn("assistant", "4", thought="\nsure\n"),
]

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def case(name, template, messages, tools=None, prompt=True, extra=None, tokens=TOKENS):
    return {
        "name": name, "template": template, "messages": messages, "tools": tools,
        "add_generation_prompt": prompt, "extra": extra or {}, "tokens": tokens,
    }


def of_file(name, file, *args, **kwargs):
    return case(name, (CHAT / file).read_text(), *args, **kwargs)


def snippet(name, template, **extra):
    """A feature on its own; `extra` holds the variables it looks at."""
    return case("feature: " + name, template, HELLO, prompt=False, extra=extra)


CASES = [
    of_file("turns: one", "turns.jinja", HELLO),
    of_file("turns: no prompt", "turns.jinja", TALK, prompt=False),
    of_file("turns: none", "turns.jinja", []),
    of_file("turns: content is missing", "turns.jinja", [{"role": "user"}]),
    of_file("turns: content is null", "turns.jinja", [turn("user", None)]),
    of_file("headers: one", "headers.jinja", HELLO),
    of_file("headers: talk", "headers.jinja", TALK, extra={"date_string": "26 Jul 2024"}),
    of_file("headers: tools", "headers.jinja", TOOL_TALK, tools=[WEATHER, CLOCK]),
    of_file("headers: tools in system", "headers.jinja", TOOL_TALK, tools=[WEATHER],
            extra={"tools_in_user_message": False}),
    of_file("headers: tools without a user", "headers.jinja", [TALK[0]], tools=[CLOCK]),
    of_file("headers: two calls", "headers.jinja", THINKING, tools=None),
    of_file("headers: built in", "headers.jinja", [
        turn("user", "search"),
        turn("assistant", "", tool_calls=[call("search", {"query": "a b", "kind": "web"})]),
        turn("ipython", {"hits": ["é", None, True, 3, 2.5]}),
    ], extra={"builtin_tools": ["search", "interpreter", "math"]}),
    of_file("headers: empty tools", "headers.jinja", HELLO, tools=[]),
    of_file("thinking: talk", "thinking.jinja", TALK),
    of_file("thinking: off", "thinking.jinja", TALK, extra={"enable_thinking": False}),
    of_file("thinking: on", "thinking.jinja", TALK, extra={"enable_thinking": True}),
    of_file("thinking: tools", "thinking.jinja", TOOL_TALK, tools=[WEATHER, CLOCK]),
    of_file("thinking: thoughts", "thinking.jinja", THINKING, prompt=False),
    of_file("thinking: list content", "thinking.jinja",
            [turn("user", [{"type": "text", "text": "hi"}])]),
    of_file("instructions: one", "instructions.jinja", HELLO),
    of_file("instructions: talk", "instructions.jinja", TALK),
    of_file("instructions: tools", "instructions.jinja", TOOL_TALK, tools=[WEATHER, CLOCK]),
    of_file("instructions: two users", "instructions.jinja", HELLO + HELLO),
    of_file("instructions: short id", "instructions.jinja", [
        turn("user", "x"), turn("assistant", "", tool_calls=[call("clock", {}, id="1")]),
    ]),
    of_file("instructions: other role", "instructions.jinja", [
        turn("user", "x"), turn("critic", "y"),
    ]),
    of_file("instructions: wrapped result", "instructions.jinja", [
        turn("user", "x"), turn("tool", {"content": {"a": [1, "b", None]}}),
    ]),
    snippet("block trimming", "a\n  {% if true %}\n  b\n  {% endif %}\n  {% if true %}c{% endif %}\nd\n"),
    snippet("kept whitespace", "a\n  {%+ if true %}\n  b\n  {%- endif +%}\nc\n\n"),
    snippet("comments", "a\n  {# note #}\nb {#- note -#}\n c"),
    snippet("raw", "{% raw %}{{ not this }} {% nor this %}{% endraw %}"),
    snippet("generation tag", "x\n{% generation %}\nanswer{{ '!' }}\n{% endgeneration %}\ny\n{%- generation -%}\n z {%- endgeneration -%}\n w"),
    snippet("loop controls", "{% for i in range(10) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}"),
    snippet("loop variables", "{% for i in ['a', 'b', 'c'] %}{{ loop.index }}{{ loop.revindex0 }}{{ loop.length }}{{ loop.previtem|default('-') }}{{ loop.nextitem|default('-') }}{{ loop.cycle('x', 'y') }} {% else %}never{% endfor %}"),
    snippet("loop over items", "{% for k, v in d.items() %}{{ k }}{{ v }}{{ loop.last }}{{ loop.length }} {% endfor %}{% for k, v in d | items %}{{ loop.length }}{% endfor %}{% for c in 'ab' %}{{ c }}{% endfor %}", d={"a": 1, "b": 2}),
    snippet("for else", "{% for i in [] %}a{% else %}none{% endfor %}"),
    snippet("filtered loop", "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{% endfor %}"),
    snippet("macro", "{% macro show(x, y=2, z='q') %}{{ x }}-{{ y }}-{{ z }};{% endmacro %}{{ show(1) }}{{ show(1, z=3) }}"),
    snippet("call", "{% macro box(n) %}[{{ caller(n) }}]{% endmacro %}{% call(i) box(3) %}in {{ i }}{% endcall %}"),
    snippet("set block", "{% set x %}a{{ 1 + 1 }}b{% endset %}{{ x | upper }}"),
    snippet("filter block", "{% filter upper %}abc{% endfilter %}"),
    snippet("namespace", "{% set ns = namespace(n=0, s='') %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% set ns.s = ns.s ~ i %}{% endfor %}{{ ns.n }} {{ ns.s }}"),
    snippet("scoping", "{% set x = 1 %}{% for i in [1] %}{% set x = 2 %}{% endfor %}{{ x }}{% if true %}{% set x = 3 %}{% endif %}{{ x }}"),
    snippet("unpacking", "{% for k, v in {'b': 1, 'a': [2]}.items() %}{{ k }}={{ v }} {% endfor %}{% set a, b = 1, 2 %}{{ a }}{{ b }}"),
    snippet("values as Python prints them", "{{ true }} {{ false }} {{ none }} {{ 1.0 }} {{ [1, 'a', none, true] }} {{ {'k': 'v', 'n': {'x': 1.5}} }} {{ (1, 'b') }}"),
    snippet("printed strings", "{{ [\"it's\", 'say \"x\"', 'a\\nb', 'é'] }}"),
    snippet("joined types", "{{ 1 ~ 'a' ~ none ~ true ~ 2.5 }}"),
    snippet("arithmetic", "{{ 7 // 2 }} {{ 7 / 2 }} {{ -7 % 3 }} {{ 2 ** 10 }} {{ 'ab' * 3 }} {{ [1] + [2] }} {{ -7 // 2 }} {{ 4 / 2 }}"),
    snippet("comparison", "{{ 1 < 2 and 2 <= 2 and 'a' < 'b' and 1 == 1.0 and not 1 != 1 }} {{ 'a' in 'abc' }} {{ 'k' in {'k': 1} }} {{ 3 not in [1, 2] }} {{ [1, 2] == [1, 2] }}"),
    snippet("and or return values", "{{ '' or 'b' }} {{ 'a' and 'c' }} {{ none or 0 }}"),
    snippet("inline if without else", "[{{ 'a' if false }}]"),
    snippet("slices", "{{ 'hello'[1:3] }} {{ 'hello'[-2:] }} {{ [1, 2, 3][::-1] }} {{ 'héllo'[:2] }} {{ 'abc'[::-1] }} {{ [1, 2, 3][-1] }}"),
    snippet("string methods", "{{ ' a b '.strip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'a,b,c'.split(',') }}|{{ 'a b  c'.split() }}|{{ 'a,b,c'.split(',', 1) }}|{{ 'Ab'.lower() }}{{ 'Ab'.upper() }}|{{ 'hello world'.title() }}|{{ 'hello'.capitalize() }}|{{ 'aXbX'.replace('X', '-') }}|{{ 'aXbX'.replace('X', '-', 1) }}|{{ 'abc'.find('c') }}{{ 'abc'.find('z') }}|{{ ','.join(['a', 'b']) }}|{{ 'a\\nb\\n'.splitlines() }}|{{ 'abc'.startswith('ab') }}{{ 'abc'.endswith(('x', 'c')) }}|{{ '12'.isdigit() }}|{{ 'abcabc'.count('bc') }}"),
    snippet("more string methods", "{{ 'prefix-x'.removeprefix('prefix-') }}|{{ 'x.py'.removesuffix('.py') }}|{{ 'a=b=c'.partition('=') }}|{{ 'a=b=c'.rpartition('=') }}|{{ 'abc'.partition('=') }}|{{ 'a b c'.rsplit(' ', 1) }}|{{ ' a  b c '.rsplit() }}|{{ ' a  b c '.rsplit(none, 1) }}|{{ 'abc'.index('b') }}|{{ '7'.zfill(3) }}{{ '-7'.zfill(4) }}|{{ 'ABC'.casefold() }}"),
    snippet("formatting", "{{ 'a {} b {}'.format(1, 'x') }} {{ '%s-%d' | format('q', 3) }} {{ '{:>4}|{:.1f}'.format('r', 2.25) }}"),
    snippet("dictionary methods", "{{ d.get('a') }} {{ d.get('z') }} {{ d.get('z', 5) }} {{ d.keys() | list }} {{ d.values() | list }} {{ d.items() | list }}", d={"b": 1, "a": "x"}),
    snippet("a key named items", "{% for k, v in d.items() %}{{ k }}:{{ v }};{% endfor %}{{ d['items'] }}", d={"type": "array", "items": 4}),
    snippet("dictionary order", "{{ d }} {{ d | tojson }} {{ d | dictsort }} {% for k in d %}{{ k }}{% endfor %}", d={"z": 1, "a": 2, "m": 3}),
    snippet("list methods", "{{ [1, 2, 1].count(1) }} {{ ['a', 'b'].index('b') }}"),
    snippet("append is refused", "{% set l = [] %}{{ l.append(1) }}"),
    snippet("tests", "{{ 1 is number }}{{ 1 is integer }}{{ 1.5 is float }}{{ 'a' is string }}{{ {} is mapping }}{{ [] is sequence }}{{ [] is iterable }}{{ none is none }}{{ true is boolean }}{{ true is true }}{{ x is defined }}{{ x is undefined }}{{ 3 is odd }}{{ 4 is even }}{{ 4 is divisibleby(2) }}{{ 'a' is in ['a'] }}{{ 1 is eq 1 }}{{ {} is iterable }}{{ 'a' is sequence }}{{ {} is sequence }}{{ 'a' is iterable }}{{ 3 is iterable }}{{ none is iterable }}{{ none is sequence }}{{ x is iterable }}"),
    snippet("filters", "{{ [3, 1, 2] | sort | join('-') }} {{ [1, 2] | first }}{{ [1, 2] | last }} {{ 'abc' | length }} {{ [1, 1, 2] | unique | list }} {{ x | default('d') }} {{ '' | default('d', true) }} {{ [1, 2, 3] | sum }} {{ [1, 5] | max }} {{ 3.7 | int }} {{ '3' | int + 1 }} {{ 3 | float }} {{ -3 | abs }} {{ 2.567 | round(1) }} {{ 'a b' | replace(' ', '_') }} {{ [1, 2, 3] | reverse | list }} {{ ['a', 'b'] | map('upper') | join }} {{ 'x' | string }} {{ '<a>' | e }} {{ ' q ' | trim }} {{ 'one two' | wordcount if false }}"),
    snippet("attribute filters", "{{ l | map(attribute='n') | list }} {{ l | selectattr('n', 'gt', 1) | map(attribute='s') | join(',') }} {{ l | rejectattr('s', 'equalto', 'a') | list | length }} {{ l | selectattr('q', 'defined') | list }} {{ l | groupby('s') | length }} {{ l | sort(attribute='n', reverse=true) | map(attribute='n') | list }}",
            l=[{"n": 1, "s": "a"}, {"n": 2, "s": "b"}, {"n": 3, "s": "a"}]),
    snippet("indent", "{{ 'a\\nb\\n\\nc' | indent(2) }}|{{ 'a\\nb' | indent(4, true) }}|{{ 'a\\nb' | indent(width=1, first=True) }}"),
    snippet("tojson", "{{ v | tojson }}\n{{ v | tojson(indent=2) }}\n{{ v | tojson(ensure_ascii=True) }}\n{{ v | tojson(separators=(',', ':')) }}\n{{ v | tojson(sort_keys=True) }}\n{{ v | tojson(True, 1) }}\n{{ v | tojson(indent=0) }}",
            v={"z": [1, 2.0, 1e-07, 1.5e300, 123456789012, True, None], "a": "é\"\\\n\t\u0001\u007f🌍</script>'&", "e": {}, "l": []}),
    snippet("tojson of a string", "{{ 'a' | tojson }}{{ 3 | tojson }}{{ none | tojson }}{{ (1, 2) | tojson }}"),
    snippet("tojson of undefined", "{{ nothing | tojson }}"),
    snippet("undefined prints nothing", "[{{ nothing }}][{{ messages[0].nothing }}][{% for i in nothing %}x{% endfor %}][{% if nothing %}x{% endif %}][{{ nothing is defined }}][{{ nothing | length }}][{{ nothing == none }}]"),
    snippet("attribute of undefined", "{{ nothing.at.all }}"),
    snippet("adding undefined", "{{ 'a' + nothing }}"),
    snippet("adding a number to a string", "{{ 'a' + 1 }}"),
    snippet("calling undefined", "{{ nothing() }}"),
    snippet("index out of range", "[{{ messages[7] }}]"),
    snippet("index out of range, attribute", "{{ messages[7].role }}"),
    snippet("special tokens", "{{ bos_token }}{{ eos_token }}[{{ pad_token }}]{{ unk_token is defined }}"),
    snippet("special tokens can be given", "{{ bos_token }}", bos_token="<other>"),
    snippet("tools and documents are none", "{{ tools is none }}{{ documents is none }}{{ tools is defined }}"),
    snippet("documents", "{% for d in documents %}{{ d.title }}{% endfor %}", documents=[{"title": "T"}]),
    snippet("raise", "a{{ raise_exception('No: ' + messages[0].role) }}"),
    snippet("raise in a macro", "{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{{ m() }}"),
    snippet("strftime", "{{ strftime_now('%Y-%m-%d') }} {{ strftime_now('%d %b %Y') }} {{ strftime_now('%A, %B %-d, %Y %H:%M:%S %I %p %j %y %a %%') }}"),
    snippet("no escaping", "{{ '<b>&\"' }}{{ '<b>' | safe }}"),
    snippet("adjacent strings", "{{ 'a' 'b' }}"),
    snippet("nested quotes and escapes", "{{ \"a'b\\t\\\"c\\\" \\\\ \\u00e9\" }}"),
    snippet("numbers", "{{ 1_000 }} {{ 1e3 }} {{ 10 | string + '0' }} {{ 3.0 * 2 }} {{ 0.1 + 0.2 }}"),
    snippet("range", "{{ range(3) | list }} {{ range(1, 6, 2) | list }}"),
    snippet("dict and list builders", "{{ dict(a=1, b=2) }} {{ [1, 2] | list }} {{ 'ab' | list }}"),
    snippet("carriage returns", "a\r\n{% if true %}\r\nb\r\n{% endif %}\r\nc"),
    snippet("trailing newlines", "a\n\n"),
    snippet("syntax error", "{% if %}"),
    snippet("unclosed block", "{% for m in messages %}x"),
    snippet("unknown filter", "{{ 'a' | no_such_filter }}"),
    snippet("unknown method", "{{ 'a'.no_such_method() }}"),
]


def main():
    env = environment()
    for c in CASES:
        variables = {
            "messages": c["messages"], "tools": c["tools"], "documents": None,
            "add_generation_prompt": c["add_generation_prompt"], **c["tokens"], **c["extra"],
        }
        try:
            c["expected"] = env.from_string(c["template"]).render(**variables)
        except jinja2.exceptions.TemplateError as error:
            raised = type(error) is jinja2.exceptions.TemplateError
            c["raises" if raised else "fails"] = str(error)
        except (TypeError, ValueError, AttributeError) as error:
            c["fails"] = str(error)
    text = json.dumps(CASES, ensure_ascii=False, indent=1)
    (CHAT / "expected.json").write_text(text + "\n")
    failing = [c["name"] for c in CASES if "fails" in c]
    print(f"{len(CASES)} cases with jinja2 {jinja2.__version__}; these fail there: {failing}")


main()
