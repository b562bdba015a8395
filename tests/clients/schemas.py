"""JSON schemas under speculation: what each schema yields is valid, and the same without drafts.

    python3 tests/clients/schemas.py BINARY [--suite FOLDER] [--count 200]

The schemas are those of the JSON-Schema-Test-Suite (drawn from jsonschema's source package unless a
folder is given) whose keywords llguidance claims, and some written by hand. Every schema is asked for
greedily and with a seed, by `aquila generate`, plain and with each of several algorithms. An answer
that ended by itself must be valid by the package jsonschema; one that was cut must be a prefix of
JSON by the package jiter; and all algorithms must answer as plain decoding does.

Needs the packages jsonschema and jiter.
"""

import argparse
import decimal
import glob
import json
import os
import subprocess
import sys
import tarfile
import tempfile

import jiter
import jsonschema

# Keywords that llguidance does not claim, or that refer to other documents.
UNCLAIMED = {
    "not", "if", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties", "dependentSchemas", "dependentRequired",
    "dependencies", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$anchor", "$id",
    "$vocabulary", "contentMediaType", "contentEncoding", "contentSchema",
}
# Files about other documents, about metaschemas, and about formats, which are annotations there.
ELSEWHERE = ("refRemote.json", "vocabulary.json", "format.json", "definitions.json")
BY_HAND = [
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20},
                                      "age": {"type": "integer", "minimum": 0, "maximum": 120}},
     "required": ["name", "age"], "additionalProperties": False},
    {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 6}, "minItems": 3, "maxItems": 5},
    {"enum": ["red", "green", {"rgb": [1, 2, 3]}, None]},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"anyOf": [{"type": "boolean"}, {"type": "number", "minimum": -1, "maximum": 1}]},
    {"type": "object", "properties": {"kind": {"const": "circle"}, "radius": {"type": "number", "minimum": 0, "maximum": 9}},
     "required": ["kind", "radius"], "additionalProperties": False},
    {"type": "array", "prefixItems": [{"type": "string", "maxLength": 5}, {"type": "integer", "minimum": 0, "maximum": 99}],
     "items": False, "minItems": 2},
    {"$defs": {"node": {"type": "object", "properties": {
        "value": {"type": "integer", "minimum": 0, "maximum": 9},
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
        "required": ["value"], "additionalProperties": False}}, "$ref": "#/$defs/node"},
    {"type": "object", "patternProperties": {"^x_": {"type": "boolean"}}, "additionalProperties": False,
     "maxProperties": 3},
    {"type": "integer", "multipleOf": 5, "minimum": 10, "maximum": 1000},
    {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
     "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}, "maxProperties": 3},
    {"type": ["string", "null"], "maxLength": 8, "minLength": 2},
    {"oneOf": [{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False},
               {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"], "additionalProperties": False}]},
    {"type": "string", "maxLength": 0},
    {"const": "naïve ✓ \"quoted\"\n"},
    {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
     "required": ["city"], "additionalProperties": False},
    {"type": "array", "items": {"type": "object", "properties": {"id": {"type": "integer", "minimum": 1, "maximum": 99}},
                                "required": ["id"], "additionalProperties": False}, "minItems": 1, "maxItems": 2},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "email"},
    {"type": "number", "minimum": 0.5, "exclusiveMaximum": 0.75},
    {"type": "integer", "exclusiveMinimum": -3, "maximum": 3},
    {"type": "array", "items": {"enum": [True, False, None]}, "minItems": 8, "maxItems": 8},
    {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "object", "properties": {
        "c": {"const": [1, [2, [3]]]}}, "required": ["c"], "additionalProperties": False}},
        "required": ["b"], "additionalProperties": False}}, "required": ["a"], "additionalProperties": False},
    {"anyOf": [{"const": "a" * 60}, {"const": "a" * 59 + "b"}]},
    {"type": "string", "pattern": "^(foo|bar)+[0-9]?$", "maxLength": 12},
    {"allOf": [{"type": "integer", "minimum": 10}, {"maximum": 12}]},
    {"type": "object", "properties": {"größe": {"type": "boolean"}, "naïve \"key\"": {"type": "null"}},
     "required": ["größe", "naïve \"key\""], "additionalProperties": False},
    {"type": "object", "additionalProperties": False},
    {"type": "array", "items": {"type": "array", "items": {"type": "number"}, "maxItems": 2}, "maxItems": 3},
    {"type": "string", "enum": ["north", "south", "east", "west"]},
    {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}, "degrees": {"type": "integer", "minimum": -40, "maximum": 50}},
     "required": ["unit", "degrees"]},
    {"type": "array", "prefixItems": [{"const": "sum"}, {"type": "integer", "minimum": 0, "maximum": 9}], "minItems": 2, "maxItems": 2},
    {"type": "array", "items": {"const": 0}, "minItems": 3, "maxItems": 3},
    {"type": "object", "properties": {"done": {"const": True}}, "required": ["done"], "additionalProperties": False},
    {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^v[0-9]{1,2}\\.[0-9]{1,2}$"}]},
]
ALGORITHMS = [
    ("NONE", []),
    ("EAGLE3", ["--speculative-num-steps", "4", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "8"]),
    ("MTP", ["--speculative-num-steps", "3"]),
    ("NGRAM", []),
    ("EAGLE3+NGRAM", ["--enable-overlap-schedule"]),
]


def keywords(schema):
    if isinstance(schema, dict):
        for key, value in schema.items():
            yield key
            if key not in ("const", "enum", "default", "examples"):
                yield from keywords(value.values() if key in ("properties", "patternProperties", "$defs", "definitions")
                                    and isinstance(value, dict) else value)
    elif isinstance(schema, (list, type({}.values()))):
        for item in schema:
            yield from keywords(item)


def refers_outside(schema):
    return any(not str(at).startswith("#") for at in references(schema))


def references(schema):
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref":
                yield value
            yield from references(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from references(item)


def validator(schema):
    return jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)


def suite(folder):
    seen = set()
    for path in sorted(glob.glob(os.path.join(folder, "draft*", "**", "*.json"), recursive=True), reverse=True):
        name = os.path.relpath(path, folder)
        if not name.startswith(("draft2020-12", "draft7")) or os.path.basename(path) in ELSEWHERE:
            continue
        with open(path) as file:
            cases = json.load(file)
        for case in cases:
            schema = case["schema"]
            if not isinstance(schema, dict) or set(keywords(schema)) & UNCLAIMED or refers_outside(schema):
                continue
            if name.startswith("draft7") and isinstance(schema.get("items"), list):
                continue  # It means another thing in later drafts.
            try:
                validator(schema).check_schema(schema)
            except jsonschema.SchemaError:
                continue  # The validator cannot read it, such as a regular expression of another dialect.
            key = json.dumps({key: value for key, value in schema.items() if key != "$schema"}, sort_keys=True)
            if key not in seen:
                seen.add(key)
                yield f"{name}: {case['description']}", schema


def fetched(folder):
    """The suite as jsonschema's source package has it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "jsonschema"]
    subprocess.run(command, cwd=folder, check=True)
    (package,) = glob.glob(os.path.join(folder, "jsonschema-*.tar.gz"))
    with tarfile.open(package) as archive:
        archive.extractall(folder, filter="data")
    (tests,) = glob.glob(os.path.join(folder, "jsonschema-*", "json", "tests"))
    return tests


def answers(binary, lines, algorithm, flags):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    command = [binary, "generate", "--quiet", "--input", "-", "--max-running-requests", "16",
               "--context-length", "1024", "--max-total-tokens", "16384"]
    command += [] if algorithm == "AUTO" else ["--speculative-algorithm", algorithm, *flags]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode not in (0, 3):
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def fault(schema, answer):
    text = answer["text"]
    if answer["finish_reason"] == "stop":
        # Numbers as they are written: 0.7202 is a multiple of 0.0001, though not as a double.
        schema = json.loads(json.dumps(schema), parse_float=decimal.Decimal)
        try:
            value = json.loads(text, parse_float=decimal.Decimal)
        except ValueError as error:
            return f"is not JSON: {error}"
        try:
            jsonschema.validate(value, schema, cls=validator(schema), format_checker=jsonschema.FormatChecker())
        except jsonschema.ValidationError as error:
            return f"is not valid: {error.message}"
    elif answer["finish_reason"] == "length":
        try:
            jiter.from_json(text.encode(), partial_mode="trailing-strings")
        except ValueError as error:
            return f"is no prefix of JSON: {error}"
    else:
        return f"ended by {answer['finish_reason']}: {answer.get('error')}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--suite", help="the folder `tests` of the JSON-Schema-Test-Suite")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--refused", action="store_true", help="list the schemas that are refused, with the reason")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = [("by hand", schema) for schema in BY_HAND] + list(suite(arguments.suite or fetched(folder)))
    binary = os.path.abspath(arguments.binary)

    def lines(cases):
        prompt = "Here is an example of the data as JSON:\n"
        for number, (_, schema) in enumerate(cases):
            shared = {"json_schema": schema, "max_tokens": arguments.tokens}
            yield {"id": f"{number} greedy", "prompt": prompt, "sampling": {**shared, "temperature": 0}}
            yield {"id": f"{number} seeded", "prompt": prompt,
                   "sampling": {**shared, "temperature": 1, "seed": number}}

    # What llguidance refuses is refused with a reason; the others are what is tested.
    tried = answers(binary, list(lines(cases)), *ALGORITHMS[0])
    refused = [(name, answer["error"]) for (name, _), answer in zip(cases, tried[::2]) if "text" not in answer]
    cases = [case for case, answer in zip(cases, tried[::2]) if "text" in answer]
    step = max(1, len(cases) / arguments.count)
    cases = [cases[int(at * step)] for at in range(min(len(cases), arguments.count))]

    plain, faults, rounds, ended = None, [], {}, 0
    for algorithm, flags in ALGORITHMS:
        got = answers(binary, list(lines(cases)), algorithm, flags)
        assert len(got) == 2 * len(cases)
        for at, answer in enumerate(got):
            name, schema = cases[at // 2]
            wrong = fault(schema, answer)
            if wrong:
                faults.append(f"{algorithm}: {name}: {answer['text']!r} {wrong}; {json.dumps(schema)}")
            if plain and (answer["token_ids"], answer["finish_reason"]) != plain[at]:
                faults.append(f"{algorithm}: {name}: {answer['text']!r} is not what plain decoding answers")
        if plain is None:
            plain = [(answer["token_ids"], answer["finish_reason"]) for answer in got]
            ended = sum(answer["finish_reason"] == "stop" for answer in got)
        else:
            meta = [answer["meta_info"] for answer in got if answer["meta_info"].get("spec_verify_ct")]
            verified = sum(m["spec_verify_ct"] for m in meta)
            rounds[algorithm] = round(sum(m["completion_tokens"] for m in meta) / max(1, verified), 2)
    for name, why in refused if arguments.refused else []:
        print(f"refused: {name}: {why}")
    for why in faults:
        print("fault:", why)
    print(f"{len(refused)} schemas refused with a reason, {len(cases)} served: {2 * len(cases)} requests by each of "
          f"{[name for name, _ in ALGORITHMS]}, {ended} ended by themselves; tokens per round {rounds}; "
          f"{len(faults)} faults")
    sys.exit(1 if faults or len(cases) < arguments.count else 0)


if __name__ == "__main__":
    main()
