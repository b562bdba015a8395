"""`aquila chat` in a terminal: answers stream, Ctrl-C stops the answer and not the program.

    python3 tests/clients/terminal.py target/release/aquila
"""

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
