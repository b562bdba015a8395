#!/bin/bash
# Checks and times the CUDA backend on a machine with a GPU and without a toolchain.
#
#   cargo build --release --bin aquila --workspace --example cuda_check --example rounds_on_device
#   bench/cuda.sh FOLDER[,FOLDER...] PART...
#
# A folder has the three executables of a build; with several, every command runs with one build after
# the other, so that two of them are compared under the same conditions. Parts, each of minutes on an H200:
#   checks    every operation and random rounds against their definitions; golden ids, graphs, grammars,
#             two engines, the grid of algorithms
#   compare   the kernels for many rows, compared with the contract and timed beside each other
#   decode    plain decoding and EAGLE-3 with simulated acceptance at batches 1, 4, 16 and 64, with and
#             without graphs and overlap, trees against chains
#   auto      the policy against plain decoding and fixed trees
#   start     a process that loads the model, captures its graphs and answers two tokens, and the memory
#             that it takes
#   sanitize  compute-sanitizer on a small run, where it is installed
# What a part prints goes to PART.log in the first folder; each command leaves a line here.
set -u
builds=()
IFS=, read -ra folders <<< "${1:?the folder of the executables}"
for folder in "${folders[@]}"; do
    folder=$(cd "$folder" && pwd) || exit
    builds+=("$folder")
done
folder=${builds[0]}
shift
root=$(cd "$(dirname "$0")/.." && pwd)
export AQUILA_MODELS=${AQUILA_MODELS:-$root/models}
export AQUILA_FIXTURES=${AQUILA_FIXTURES:-$root/crates/aquila-model/tests/fixtures}
model=${MODEL:-preset:llama-3.1-8b}
device=${DEVICE:-cuda}
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,temperature.gpu --format=csv,noheader || true

# What a log says in a line: tokens per second of the repetitions of `bench decode`, lowest to highest,
# with the microseconds of a round of the last one, or the log's last line.
summary() {
    python3 - "$1" <<'END'
import json, sys
lines = [line for line in open(sys.argv[1], errors="replace") if line.strip() and not line.startswith("(")]
runs = [json.loads(line) for line in lines if line.startswith('{"repetition"')]
if not runs:
    sys.exit(print(lines[-1].strip() if lines else ""))
speeds = sorted(run["decode_tokens_per_second"] for run in runs)
prompts = max(run["prefill_tokens_per_second"] for run in runs)
of_round = ", ".join(f"{step} {time:.0f}" for step, time in runs[-1]["round_microseconds"].items())
accepted = runs[-1]["accept_length"]
print(f"{speeds[0]:.0f} to {speeds[-1]:.0f} tok/s; round, us: {of_round}; prompts {prompts:.0f} tok/s" +
      (f"; {accepted:.2f} tokens a round" if accepted else ""))
END
}

# Runs a program of each build within so many seconds and prints how it ended, how long it took, and what
# it said. Words before the program's name in PREFIX run it.
try() {
    local name=$1 limit=$2 program=$3 build began ended
    shift 3
    for build in "${builds[@]}"; do
        began=$SECONDS
        timeout "$limit" ${PREFIX:-} "$build/$program" "$@" > "$folder/last.log" 2>&1
        ended=$?
        { echo "== $name, $build: $program $*"; cat "$folder/last.log"; } >> "$folder/$part.log"
        test ${#builds[@]} = 1 || printf '%-12s ' "$(basename "$build")"
        printf '%-34s rc %-3s %4s s  %s\n' "$name" "$ended" $((SECONDS - began)) \
            "$(summary "$folder/last.log")"
    done
}

# Tokens per second of decoding with these flags, lowest to highest.
decode() {
    local name=$1
    shift
    # Prompts are read before the first answer ends.
    try "$name" 120 aquila bench decode "$model" --device "$device" --prompt-tokens 448 --tokens 128 \
        --repeat 3 --max-running-requests 64 --chunked-prefill-size 4096 "$@"
}

eagle() {
    local steps=$1 length=$2
    shift 2
    decode "EAGLE-3, $steps steps, $*" --speculative-algorithm EAGLE3 --speculative-num-steps "$steps" \
        --simulate-acc-len "$length" "$@"
}

for part in "$@"; do
    : > "$folder/$part.log"
    echo "-- $part"
    case $part in
    checks)
        try "operations" 150 cuda_check check
        try "random rounds" 150 cuda_check rounds 60
        for word in golden families graphs grammars transfer grid; do
            try "$word" 150 rounds_on_device cuda $word
        done
        try "the CPU's bits" 150 rounds_on_device cuda-plain cpu-bits
        ;;
    compare)
        try "every kernel of projections" 150 cuda_check kernels
        try "kernels beside each other" 400 cuda_check compare
        ;;
    decode)
        for batch in 1 4 16 64; do
            decode "plain, $batch" --speculative-algorithm NONE --batch $batch
            eagle 3 2.90 --batch $batch
        done
        eagle 7 3.86 --batch 1
        decode "plain, 1, no graphs" --speculative-algorithm NONE --batch 1 --disable-cuda-graph
        decode "plain, 8" --speculative-algorithm NONE --batch 8
        for batch in 1 8 64; do
            decode "plain, $batch, no overlap" --speculative-algorithm NONE --batch $batch --disable-overlap-schedule
        done
        eagle 5 3.52 --batch 1 --speculative-num-draft-tokens 16 --speculative-eagle-topk 4
        eagle 5 3.52 --batch 1
        try "steps of a round" 100 cuda_check steps
        try "passes" 100 cuda_check time
        ;;
    auto)
        for batch in 1 4 16 64; do
            for rate in 0.25 0.5 0.7; do
                try "auto, $batch, $rate" 100 aquila bench spec "$model" --device "$device" --batch $batch \
                    --simulate-acc-rate $rate --shapes auto,3/1/4,plain
            done
        done
        ;;
    start)
        try "the first tokens" 100 aquila bench decode "$model" --device "$device" --prompt-tokens 8 \
            --tokens 2 --repeat 1 --speculative-algorithm NONE
        grep -a '^total\|^graphs\|^memory' "$folder/$part.log"
        ;;
    sanitize)
        for tool in memcheck racecheck; do
            PREFIX="compute-sanitizer --tool $tool" try "$tool" 250 cuda_check check small rounds 2
        done
        ;;
    *) echo "no such part: $part" ;;
    esac
done
