"""`aquila chat` in a terminal: answers stream, Ctrl-C stops the answer and not the program.

    python3 tests/clients/terminal.py target/release/aquila
"""

import json
import os
import pty
import select
import sys
import tempfile
import time

PATIENCE = 600


class Terminal:
    def __init__(self, binary, *flags):
        self.seen = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp()
            os.environ["TERM"] = "xterm"
            os.execv(binary, [binary, "chat", *flags])

    def wait_for(self, *wanted):
        """Reads until one of these comes; what was before it is dropped."""
        until = time.monotonic() + PATIENCE
        while not any(text in self.seen for text in wanted):
            assert time.monotonic() < until, f"{wanted} never came: {self.seen!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                self.seen += os.read(self.fd, 1 << 16)
        at = min(self.seen.find(text) for text in wanted if text in self.seen)
        before, self.seen = self.seen[:at], self.seen[at:]
        return before

    def type(self, text):
        self.seen = b""
        os.write(self.fd, text)

    def ended(self):
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    os.read(self.fd, 1 << 16)
                except OSError:
                    time.sleep(0.05)
        os.kill(self.pid, 9)
        raise AssertionError("the program did not end")


def main(binary):
    # Waiting for the end of a paste bracket is waiting for the prompt to be ready.
    ready = b"\x1b[?2004h"
    chat = Terminal(binary, "--temperature", "0", "--max-tokens", "24")
    chat.wait_for(ready)
    chat.type(b"Tom has 3 apples. How many?\r")
    chat.wait_for(b"tokens/s")
    chat.wait_for(ready)
    print("ok      an answer comes with its speed")
    # The line before, brought back with the arrow and changed with backspace.
    chat.type(b"\x1b[A\x7f!\r")
    chat.wait_for(b"Tom has 3 apples. How many?")
    chat.wait_for(b"!")
    chat.wait_for(b"tokens/s")
    chat.wait_for(ready)
    print("ok      lines are edited and remembered")
    folder = tempfile.mkdtemp()
    saved = os.path.join(folder, "chat.json")
    for typed, said in [
        (b"/help", b"/save FILE"),
        (b"/set top_p 2", b"not set: top_p: must be above 0 and at most 1"),
        (b"/set heat 1", b"not set: heat: no such setting"),
        (b"/set max_tokens 3", b"max_tokens is 3 from now on"),
        (b"/set", b"max_tokens = 3"),
        (b"/system Be brief.", b"the model is told so from now on"),
        (b"/nothing", b"/nothing is no command"),
        (b"Hello", b"3 tokens"),
        (b"/save " + saved.encode(), b"3 questions and their answers are in"),
        (b"/save " + saved.encode(), b"not saved: "),
    ]:
        chat.type(typed + b"\r")
        chat.wait_for(said)
        chat.wait_for(ready)
    with open(saved) as file:
        conversation = json.load(file)
    roles = [message["role"] for message in conversation["messages"]]
    assert roles == ["system"] + ["user", "assistant"] * 3, roles
    assert conversation["settings"] == {"max_tokens": 3}
    print("ok      settings, a system prompt and a file of the conversation")
    chat.type(b"/exit\r")
    assert chat.ended() == 0
    print("ok      /exit leaves")

    chat = Terminal(binary, "--temperature", "0", "--ignore-eos")
    chat.wait_for(ready)
    chat.type(b"Tell me about Rust\r")
    # The terminal leaves the line editor before the answer comes.
    chat.wait_for(b"\x1b[?2004l")
    chat.wait_for(b"the", b"The", b"\r\n")
    time.sleep(0.3)
    chat.type(b"\x03")
    chat.wait_for(b"stopped")
    chat.wait_for(ready)
    print("ok      Ctrl-C stops the answer")
    chat.type(b"\x03")
    chat.wait_for(ready)
    chat.type(b"\x04")
    assert chat.ended() == 0
    print("ok      Ctrl-C leaves the program running, Ctrl-D ends it")


if __name__ == "__main__":
    main(sys.argv[1])
