"""Plain decoding of one model by Aquila and by llama.cpp, in turns, on this machine.

    python3 -m venv venv && venv/bin/pip install -r bench/requirements.txt
    cargo build --release
    venv/bin/python bench/peers.py --aquila target/release/aquila --report peers.md

Both engines get the same random weights in the shape of `preset:bench` (see checkpoint.py): bf16
against BF16, int8 against Q8_0. Before anything is timed, both must agree on log-probabilities;
otherwise there is nothing to compare. Then they take turns: one run of each is a pair, and ratios
are those of pairs, so that what else the machine does meets both.

A run reads random prompts, then decodes greedily; decoding alone is compared. llama.cpp runs with
whichever of its attention and cache settings is fastest here. Its choice of a token is numpy's
argmax, which is faster than its own sampler.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

import checkpoint
import llama_peer

FORMATS = {
    "bf16": ("BF16", gguf.GGMLQuantizationType.BF16, []),
    "int8": ("Q8_0", gguf.GGMLQuantizationType.Q8_0, ["--quantization", "int8"]),
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--aquila", type=Path, default=Path("target/release/aquila"))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/aquila/peers")
    parser.add_argument("--formats", default="bf16,int8")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--cpu-isa", default="auto")
    parser.add_argument("--verify-only", action="store_true")
    parser.add_argument("--report", type=Path, help="write the table here too")
    return parser.parse_args()


def aquila_flags(options, folder, format):
    return [
        str(folder),
        *FORMATS[format][2],
        *("--threads", str(options.threads), "--cpu-isa", options.cpu_isa),
        *("--max-total-tokens", "8192", "--context-length", "1024", "--quiet"),
    ]


def verify(options, folder, format, model):
    """Says how far apart the engines' log-probabilities are; ends the script if too far."""
    random = np.random.default_rng(1)
    prompts = [random.integers(0, model.vocabulary, n).tolist() for n in (1, 9, 64, 200)]
    sampling = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "top_logprobs": 10}
    with tempfile.TemporaryDirectory() as scratch:
        asks, answers = Path(scratch, "in.jsonl"), Path(scratch, "out.jsonl")
        lines = [
            {"id": i, "prompt_ids": p, "sampling": sampling | {"logprobs": True}}
            for i, p in enumerate(prompts)
        ]
        asks.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = [options.aquila, "generate", *aquila_flags(options, folder, format)]
        subprocess.run([*command, "--input", asks, "--output", answers], check=True)
        outputs = [json.loads(line) for line in answers.read_text().splitlines()]
    context = llama_peer.Context(model, 1, 512, options.threads, False, False)
    apart, agreed, total = [], 0, 0
    for prompt, output in zip(prompts, outputs):
        ids = output["token_ids"]
        theirs = context.log_probabilities(prompt + ids[:-1], len(prompt) - 1)
        for place, row in zip(output["logprobs"], theirs):
            apart += [abs(row[token] - logprob) for token, logprob in place["top"]]
            agreed += int(row.argmax()) == place["id"]
            total += 1
    context.close()
    largest, mean = max(apart), float(np.mean(apart))
    print(
        f"{format}: log-probabilities of the ten most likely tokens differ by {mean:.4f} on "
        f"average and {largest:.4f} at most; the most likely token agrees at {agreed} of {total}",
        flush=True,
    )
    if mean > 0.05 or agreed < 0.8 * total:
        sys.exit(f"{format}: the engines do not compute the same function")
    return mean, largest, agreed, total


class Aquila:
    """`aquila bench decode`, which runs once for each line it is sent."""

    def __init__(self, options, folder, format, batch):
        command = [options.aquila, "bench", "decode", *aquila_flags(options, folder, format)]
        command += ["--batch", str(batch), "--prompt-tokens", str(options.prompt_tokens)]
        command += ["--tokens", str(options.tokens), "--repeat", "1000000", "--paced"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        figures = json.loads(self.process.stdout.readline())
        return figures["decode_tokens_per_second"], figures["prefill_tokens_per_second"]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Llama:
    """llama.cpp with the settings that decode fastest."""

    def __init__(self, options, model, batch):
        self.options, self.model, self.batch = options, model, batch
        self.random = np.random.default_rng(2)
        length = options.prompt_tokens + options.tokens
        contexts = {}
        for flash in (False, True):
            for unified in (False, True) if batch > 1 else (False,):
                key = (flash, unified)
                contexts[key] = llama_peer.Context(
                    model, batch, length, options.threads, flash, unified
                )
        speeds = {key: [] for key in contexts}
        short = options.prompt_tokens // 2
        for _ in range(2):
            for key, context in contexts.items():
                prompts = [prompt[:short] for prompt in self.prompts()]
                speeds[key].append(context.run(prompts, 17)[0])
        best = max(contexts, key=lambda key: max(speeds[key]))
        for key, context in contexts.items():
            if key != best:
                context.close()
        self.context = contexts[best]
        self.settings = "flash attention " + ("on" if best[0] else "off")
        if batch > 1:
            self.settings += ", unified cache " + ("on" if best[1] else "off")

    def prompts(self):
        size = (self.batch, self.options.prompt_tokens)
        return self.random.integers(0, self.model.vocabulary, size).tolist()

    def run(self):
        return self.context.run(self.prompts(), self.options.tokens)

    def close(self):
        self.context.close()


def compare(options, folder, format, model, batch):
    """Runs pairs and answers the figures of each."""
    # A first run each, uncounted; Aquila is loaded before llama.cpp tries its settings.
    aquila = Aquila(options, folder, format, batch)
    aquila.run()
    llama = Llama(options, model, batch)
    llama.run()
    pairs = []
    for index in range(options.pairs):
        sides = {}
        # Who goes first changes, and both rest until the other's threads sleep.
        for name in ("aquila", "llama") if index % 2 == 0 else ("llama", "aquila"):
            time.sleep(0.3)
            sides[name] = (aquila if name == "aquila" else llama).run()
        pairs.append(sides)
        ours, theirs = sides["aquila"][0], sides["llama"][0]
        print(
            f"{format} batch {batch} pair {index}: aquila {ours:.1f}, llama.cpp {theirs:.1f} "
            f"tokens/s, ratio {ours / theirs:.3f}, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    aquila.close()
    llama.close()
    return pairs, llama.settings


def interval(ratios):
    """The middle 95 % of the medians of resampled pairs."""
    random = np.random.default_rng(3)
    medians = np.median(random.choice(ratios, (4000, len(ratios))), axis=1)
    return np.quantile(medians, [0.025, 0.975])


def row(format, batch, pairs, settings):
    decode = {s: np.array([p[s][0] for p in pairs]) for s in ("aquila", "llama")}
    prefill = {s: np.median([p[s][1] for p in pairs]) for s in ("aquila", "llama")}
    ratios = decode["aquila"] / decode["llama"]
    low, high = interval(ratios)
    return (
        f"| {format} / {FORMATS[format][0]} | {batch} | {np.median(decode['aquila']):.1f} "
        f"({decode['aquila'].max():.1f}) | {np.median(decode['llama']):.1f} "
        f"({decode['llama'].max():.1f}) | {np.median(ratios):.2f} | {low:.2f} to {high:.2f} "
        f"| {ratios.min():.2f} to {ratios.max():.2f} | {prefill['aquila'] / prefill['llama']:.2f} "
        f"| {settings} |"
    )


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def main():
    options = arguments()
    folder = options.cache / "bench-shape"
    checkpoint.make_folder(folder)
    report = [
        "# Plain decoding, Aquila against llama.cpp",
        "",
        f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, {options.threads} threads "
        f"each, instruction set of Aquila: {options.cpu_isa}. llama-cpp-python "
        f"{llama_cpp.__version__}: {llama_cpp.llama_print_system_info().decode().strip()}",
        "",
        f"Prompts of {options.prompt_tokens} tokens, answers of {options.tokens}, greedy; "
        f"{options.pairs} pairs. Tokens per second: median (best).",
        "",
        "| weights | batch | Aquila | llama.cpp | ratio, median | its 95 % interval "
        "| of single pairs | prefill ratio | llama.cpp's settings |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    agreement = []
    for format in options.formats.split(","):
        name, kind, _ = FORMATS[format]
        path = options.cache / f"bench-shape-{name}.gguf"
        checkpoint.convert(folder, path, kind)
        model = llama_peer.Model(path)
        mean, largest, agreed, total = verify(options, folder, format, model)
        agreement.append(
            f"- {format} against {name}: log-probabilities of the ten most likely tokens differ by "
            f"{mean:.4f} on average and {largest:.4f} at most; the most likely token agrees at "
            f"{agreed} of {total} places."
        )
        if options.verify_only:
            continue
        for batch in map(int, options.batches.split(",")):
            pairs, settings = compare(options, folder, format, model, batch)
            report.append(row(format, batch, pairs, settings))
    report += ["", "That both compute the same function:", "", *agreement, ""]
    text = "\n".join(report)
    print("\n" + text)
    if options.report:
        options.report.write_text(text)


if __name__ == "__main__":
    main()
