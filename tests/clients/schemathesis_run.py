"""schemathesis against a running server: nothing that it sends may be answered with a 5xx.

    VENV/bin/pip install -r tests/clients/requirements-schemathesis.txt
    VENV/bin/python tests/clients/schemathesis_run.py target/release/aquila [--seconds 600]

The context is short, so that answers are. Exit code 0 if no response was a server error.
"""

import argparse
import os
import subprocess
import sys

from openai_client import Server


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    command = [os.path.join(os.path.dirname(sys.executable), "schemathesis"), "run"]
    with Server(options.binary, ["--context-length", "64"]) as server:
        root = server.url.removesuffix("/v1")
        command += [f"{root}/openapi.json", "--url", root, "--checks", "not_a_server_error"]
        command += ["--max-time", str(options.seconds), "--continue-on-failure"]
        command += ["--seed", str(options.seed), "--mode", "all", "--suppress-health-check", "all"]
        command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "100000"]
        command += ["--request-timeout", "120", "--workers", "2"]
        ran = subprocess.run(command)
    print(f"schemathesis ended with {ran.returncode}, the server with {server.code}")
    return ran.returncode != 0 or server.code != 0


if __name__ == "__main__":
    sys.exit(main())
