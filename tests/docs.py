#!/usr/bin/env python3
"""Runs the commands of README.md and docs/*.md against the built binary, and checks their links.

    python3 tests/docs.py target/debug/aquila [PAGE…]

What the word behind the three backticks means:

    sh, bash      run, in order, all blocks of a page in one shell and one empty folder
    python        run by the Python that runs this file, after what comes before it
    sh norun      shown only: it needs the network, a container engine, a GPU or a build
    sh serving    run beside a server, started as `aquila serve` if the page has not started one
    sh fails      run; it has to end with an error
    output        what the block before it prints, standard error included: each line has to be
                  found, in this order; … stands for anything
    other words   shown only

`aquila serve … &` is waited for until it is ready. Pages say port 30000; a free one is put in its
place. Every server is ended with its page.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE_SECONDS = 120
RUN = {"sh", "bash", "python"}
# A block that is not run and begins a line so has to say that it is not.
COMMAND = re.compile(r"^(\$ |aquila |curl |python3? |pip |cargo )", re.M)
# Puts a server on the port of its page.
AQUILA = r"""#!/bin/sh
case "$1 $* " in
"serve "*" --port "*) ;;
"serve "*) set -- "$@" --port "$DOCS_PORT" ;;
esac
exec "$DOCS_BINARY" "$@"
"""
PRELUDE = r"""
set -eo pipefail
await_ready() {
    for _ in $(seq 600); do
        if grep -q "ready: http" "$2"; then return; fi
        if ! kill -0 "$1" 2>/dev/null; then break; fi
        sleep 0.1
    done
    echo "the server did not become ready:"; cat "$2"; return 1
}
"""


class Block:
    """A fenced block of a page."""

    def __init__(self, words, line, text):
        self.words, self.line, self.text = words, line, text

    @property
    def runs(self):
        return bool(self.words) and self.words[0] in RUN and "norun" not in self.words

    @property
    def fails(self):
        return "fails" in self.words


def blocks(text):
    """The fenced blocks of a page."""
    found, inside, words, begun = [], None, [], 0
    for number, line in enumerate(text.split("\n"), 1):
        if inside is None and line.lstrip().startswith("```"):
            inside, words, begun = [], line.strip().strip("`").split(), number
        elif inside is not None and line.strip() == "```":
            found.append(Block(words, begun, "\n".join(inside)))
            inside = None
        elif inside is not None:
            inside.append(line)
    if inside is not None:
        raise SystemExit(f"a block that begins in line {begun} does not end")
    return found


def mistakes(page, text, all_blocks):
    """What can be said of a page without running it."""
    for block in all_blocks:
        shown = not block.runs and "norun" not in block.words and "output" not in block.words
        if shown and COMMAND.search(block.text):
            yield f"{page}:{block.line}: has a command: begin it with ```sh, or ```sh norun"
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(text)):
        target, _, anchor = link.partition("#")
        path = page.parent / target if target else page
        if "://" in link:
            continue
        if not path.exists():
            yield f"{page}: links to {link}, which does not exist"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text()):
            yield f"{page}: links to {link}, and there is no such heading"


def without_blocks(text):
    return re.sub(r"```.*?```", "", text, flags=re.S)


def anchors(text):
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def script(all_blocks, folder, port):
    """A shell script that runs the blocks and writes what each prints into a file of its own."""
    parts = [PRELUDE]
    servers = 0
    for index, block in enumerate(all_blocks):
        if not block.runs:
            continue
        text = block.text.replace("30000", str(port))
        if block.words[0] == "python":
            (folder / f".{index}.py").write_text(text)
            text = f'"$DOCS_PYTHON" .{index}.py'
        lines = []
        if "serving" in block.words and not servers:
            text = f"aquila serve &\n{text}"
        for line in text.split("\n"):
            if re.match(r"(\w+=\S+ )*\S*aquila serve\b.*&$", line):
                servers += 1
                log = f".server{servers}.log"
                line = f'{line[:-1].rstrip()} > {log} 2>&1 &\nawait_ready $! "$PWD/{log}"'
            lines.append(line)
        body = "\n".join(lines)
        if block.fails:
            body = f"if (\n{body}\n); then echo 'it did not fail'; exit 1; fi"
        parts.append(f"echo {index} > .at\n{{\n{body}\n}} > .{index}.out 2>&1")
    parts.append("echo done > .at")
    return "\n".join(parts)


def matches(expected, printed):
    """The first line of `expected` that is not found in order; none if all are."""
    lines = iter(printed.split("\n"))
    for wanted in filter(str.strip, expected.split("\n")):
        pieces = [re.escape(piece) for piece in wanted.strip().split("…")]
        pattern = re.compile(".*".join(pieces))
        if not any(pattern.fullmatch(line.strip()) for line in lines):
            return wanted
    return None


def run(page, all_blocks, binary, cache):
    """Runs a page; answers what went wrong."""
    with tempfile.TemporaryDirectory(prefix="aquila-docs-") as name:
        folder = Path(name)
        tools = folder / ".bin"
        tools.mkdir()
        (tools / "aquila").write_text(AQUILA)
        (tools / "aquila").chmod(0o755)
        port = free_port()
        (folder / ".script").write_text(script(all_blocks, folder, port))
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.lower().endswith("_proxy") and not key.startswith(("AQUILA_", "HF_", "XDG_"))
        }
        environment |= {
            "PATH": f"{tools}:{environment.get('PATH', '')}",
            "HOME": name,
            "XDG_CACHE_HOME": str(cache),
            "HF_HUB_OFFLINE": "1",
            "DOCS_BINARY": str(binary),
            "DOCS_PORT": str(port),
            "DOCS_PYTHON": sys.executable,
        }
        shell = subprocess.Popen(
            ["bash", ".script"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = shell.wait(PAGE_SECONDS)
        except subprocess.TimeoutExpired:
            code = "no end in time"
        finally:
            end(shell)
        at = (folder / ".at").read_text().strip() if (folder / ".at").exists() else "0"
        if at != "done":
            block = all_blocks[int(at)]
            said = (folder / f".{at}.out").read_text(errors="replace")
            yield f"{page}:{block.line}: {code}\n{block.text}\n--- printed ---\n{said}"
        for index, block in enumerate(all_blocks):
            before = index - 1
            printed = folder / f".{before}.out"
            if "output" in block.words and printed.exists() and (at == "done" or int(at) > before):
                text = printed.read_text(errors="replace").replace(str(port), "30000")
                missing = matches(block.text, text)
                if missing is not None:
                    yield f"{page}:{block.line}: not printed: {missing}\n--- printed ---\n{text}"


def end(shell):
    """Ends the shell of a page with what it started, which is in its session alone."""
    for what in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(shell.pid, what)
        except ProcessLookupError:
            break
        for _ in range(50):
            shell.poll()
            try:
                os.killpg(shell.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.1)
    shell.wait()


def main():
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    binary = Path(sys.argv[1]).resolve(strict=True)
    pages = [Path(page).resolve() for page in sys.argv[2:]]
    pages = pages or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    cache = Path(tempfile.mkdtemp(prefix="aquila-docs-cache-"))
    wrong = []
    try:
        for path in pages:
            began, text = time.monotonic(), path.read_text()
            all_blocks, page = blocks(text), path.relative_to(ROOT)
            os.chdir(ROOT)
            of_page = list(mistakes(page, text, all_blocks))
            count = sum(block.runs for block in all_blocks)
            if count:
                of_page += run(page, all_blocks, binary, cache)
            seconds = time.monotonic() - began
            state = "failed" if of_page else "ok"
            print(f"{page}: {count} blocks run, {state} ({seconds:.1f} s)", flush=True)
            wrong += of_page
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    for what in wrong:
        print(f"\n{what}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
