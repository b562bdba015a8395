"""Licenses, bans and sources of all dependencies, by the rules of deny.toml.

    python3 tests/deny.py

What `cargo deny check licenses bans sources` asks of that file's keys, for machines without
cargo-deny. Needs Python 3.11 and cargo.
"""

import collections
import json
import pathlib
import re
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
REGISTRY = re.compile(r"registry\+https://[^/]+/rust-lang/crates\.io-index")


def packages(targets):
    """The packages that are built for any of these targets, by id."""
    found = {}
    for target in targets:
        command = ["cargo", "metadata", "--format-version=1", "--locked"]
        command += ["--filter-platform", target]
        graph = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
        built = {node["id"] for node in graph["resolve"]["nodes"]}
        found |= {p["id"]: p for p in graph["packages"] if p["id"] in built}
    return list(found.values())


def is_allowed(expression, allowed):
    """Whether an SPDX expression can be met with these licenses alone; `/` is an old `OR`."""
    words = re.findall(r"[()]|[^\s()]+", expression.replace("/", " OR "))

    def any_of():
        met = all_of()
        while words and words[0] == "OR":
            words.pop(0)
            met |= all_of()
        return met

    def all_of():
        met = one()
        while words and words[0] == "AND":
            words.pop(0)
            met &= one()
        return met

    def one():
        word = words.pop(0)
        if word == "(":
            met = any_of()
            words.pop(0)
            return met
        if words and words[0] == "WITH":
            word = " ".join([word, words.pop(0), words.pop(0)])
        return word in allowed

    return any_of()


def findings(rules, found):
    allowed, bans = set(rules["licenses"]["allow"]), rules["bans"]
    skipped = {entry["crate"] for entry in bans["skip"]}
    versions = collections.defaultdict(set)
    for package in found:
        name = f"{package['name']}@{package['version']}"
        versions[package["name"]].add(name)
        if not is_allowed(package["license"] or "none", allowed):
            yield f"{name}: its license is {package['license']}"
        if package["name"] in bans["deny"]:
            yield f"{name} is banned"
        if package["source"] and not REGISTRY.fullmatch(package["source"]):
            yield f"{name} comes from {package['source']}"
    for name, several in sorted(versions.items()):
        if len(several - skipped) > 1:
            yield f"{name} is there in several versions: {', '.join(sorted(several))}"
    for gone in sorted(skipped - set().union(*versions.values())):
        yield f"{gone} is skipped, and is not there"


def main():
    rules = tomllib.loads((ROOT / "deny.toml").read_text())
    found = packages(rules["graph"]["targets"])
    wrong = list(findings(rules, found))
    print("\n".join(wrong + [f"deny.toml: {len(found)} packages, {len(wrong)} findings"]))
    sys.exit(bool(wrong))


main()
