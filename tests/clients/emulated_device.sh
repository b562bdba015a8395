#!/bin/sh
# What is refused, noted and told at start on a GPU: on the emulated driver, which is named by its folder.
#
#     crates/aquila-compute/emulator/build.sh FOLDER 90
#     tests/clients/emulated_device.sh target/debug/aquila FOLDER
set -eu
binary=$1
folder=$(mktemp -d)
server=
trap 'test -z "$server" || kill "$server" 2>/dev/null || true; rm -rf "$folder"' EXIT
export LD_LIBRARY_PATH="$2"

fail() {
    echo "FAILED: $1"
    cat "$folder/log"
    exit 1
}

# refused WORDS FLAGS...: a start with these flags says these words, and loads nothing.
refused() {
    words=$1
    shift
    if "$binary" generate --prompt x --max-tokens 1 "$@" >"$folder/out" 2>"$folder/log"; then
        fail "not refused: $*"
    fi
    grep -qF -e "$words" "$folder/log" || fail "$* does not say '$words'"
    ! grep -q '^weights' "$folder/log" || fail "$* was refused after the table of memory"
}

passes="preset:llama-3.1-8b --chunked-prefill-size -1"
# shellcheck disable=SC2086
refused "--chunked-prefill-size, --max-running-requests, --speculative-num-draft-tokens: 131120 rows" \
    --device cuda $passes
# shellcheck disable=SC2086
refused "--device cpu does without the GPU" $passes
refused "--device cpu does without the GPU" --max-total-tokens 2000000000
AQUILA_EMULATOR_CUDA=12080 refused "driver serves CUDA 12.8, and CUDA 13.0 is needed" --device cuda

"$binary" serve --port 0 --device cuda --speculative-algorithm NONE --max-running-requests 4 \
    --max-total-tokens 300 --cuda-graph-bs 1,2,4,64 2>"$folder/log" &
server=$!
until url=$(sed -n 's/^ready: \(http[^ ]*\)\/v1 .*/\1/p' "$folder/log") && test -n "$url"; do
    kill -0 "$server" 2>/dev/null || fail "the server did not start"
    sleep 0.1
done
grep -qF -e "note: --cuda-graph-bs: 64 above --max-running-requests 4" "$folder/log" || fail "no note of 64"
grep -qE "^graphs +3 captured for batches of 1, 2, 4 in" "$folder/log" || fail "the line of graphs"
curl -sS "$url/server_info" >"$folder/info"
grep -qF '"cuda_graph_bs":[1,2,4]' "$folder/info" || fail "cuda_graph_bs: $(cat "$folder/info")"
grep -qF '"device":"cuda:0, emulated on the CPU' "$folder/info" || fail "device: $(cat "$folder/info")"
kill "$server"
wait "$server" || fail "it did not end well"
server=
echo "the start on an emulated device says what it should"
