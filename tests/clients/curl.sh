#!/bin/sh
# curl against a running server: how streams are framed, how signals end it, keys and TLS.
#
#     tests/clients/curl.sh target/release/aquila
set -eu
binary=$1
folder=$(mktemp -d)
trap 'kill "$server" 2>/dev/null || true; rm -rf "$folder"' EXIT

start() {
    "$binary" serve --port 0 "$@" 2>"$folder/log" &
    server=$!
    tries=0
    until url=$(sed -n 's/^ready: \(http[^ ]*\).*/\1/p' "$folder/log") && [ -n "$url" ]; do
        tries=$((tries + 1))
        [ $tries -lt 6000 ] || { echo "the server did not start"; cat "$folder/log"; exit 1; }
        sleep 0.1
    done
}

fail() {
    echo "FAILED: $1"
    exit 1
}

start
body='{"messages": [{"role": "user", "content": "Tom has 3 apples."}], "max_tokens": 8,
       "stream": true, "stream_options": {"include_usage": true}}'
curl -sSN -D "$folder/head" -o "$folder/stream" "$url/chat/completions" -d "$body"
grep -qi '^content-type: text/event-stream' "$folder/head" || fail "the content type"
# Every event is one line of data and an empty line; the last says that it is the last.
awk 'NR % 2 == 1 && !/^data: / { exit 1 } NR % 2 == 0 && length { exit 1 }' "$folder/stream" ||
    fail "the framing of events"
[ "$(tail -n 2 "$folder/stream")" = "data: [DONE]" ] || fail "the end of the stream"
[ "$(grep -c '"finish_reason":"' "$folder/stream")" = 1 ] || fail "one finish reason"
echo "ok      events are framed"

# The first event is there long before the last: nothing is held back until the end.
curl -sSN "$url/completions" -o "$folder/long" -d \
    '{"prompt": "fn main", "max_tokens": 1500, "ignore_eos": true, "stream": true}' &
client=$!
until [ -s "$folder/long" ]; do sleep 0.02; done
grep -q DONE "$folder/long" && fail "the stream came at once"
echo "ok      events come as they are made"

# SIGTERM lets the stream finish.
kill -TERM "$server"
wait "$client" || fail "the stream was cut"
[ "$(tail -n 2 "$folder/long")" = "data: [DONE]" ] || fail "the drained stream has no end"
wait "$server" || fail "draining ended with $?"
echo "ok      a signal drains"

# A second signal does not wait.
start
curl -sN "$url/completions" -o "$folder/cut" -d \
    '{"prompt": "fn main", "max_tokens": 2000, "ignore_eos": true, "stream": true, "n": 32}' &
client=$!
until [ -s "$folder/cut" ]; do sleep 0.02; done
kill -TERM "$server"
until grep -q SIGTERM "$folder/log"; do sleep 0.02; done
kill -TERM "$server"
wait "$server" && fail "the second signal drained"
wait "$client" || true
grep -q DONE "$folder/cut" && fail "the second signal waited"
echo "ok      a second signal ends at once"

# Keys and TLS.
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 \
    -subj /CN=localhost -addext 'subjectAltName = DNS:localhost, IP:127.0.0.1' \
    -keyout "$folder/key.pem" -out "$folder/cert.pem" 2>/dev/null
printf '# keys\nsk-1 alice\nsk-2\n' >"$folder/keys"
start --ssl-certfile "$folder/cert.pem" --ssl-keyfile "$folder/key.pem" \
    --api-key-file "$folder/keys" --allowed-origins https://chat.example.com
case $url in https://*) ;; *) fail "the announced address: $url" ;; esac
status() {
    curl -sS --cacert "$folder/cert.pem" -o "$folder/body" -D "$folder/head" -w '%{http_code}' "$@"
}
[ "$(status "$url/models")" = 401 ] || fail "no key was asked for"
grep -q '"code":"invalid_api_key"' "$folder/body" || fail "the error of a missing key"
[ "$(status "$url/models" -H 'Authorization: Bearer sk-1')" = 200 ] || fail "a key as bearer"
[ "$(status "$url/models" -H 'x-api-key: sk-2')" = 200 ] || fail "a key as x-api-key"
[ "$(status "$url/models" -H 'x-api-key: sk-3')" = 401 ] || fail "a wrong key"
[ "$(status "${url%/v1}/health")" = 200 ] || fail "health without a key"
echo "ok      keys are asked for"

curl -sSN --cacert "$folder/cert.pem" -o "$folder/stream" "$url/completions" -H 'x-api-key: sk-1' \
    -d '{"prompt": "fn main", "max_tokens": 50, "ignore_eos": true, "stream": true}'
[ "$(tail -n 2 "$folder/stream")" = "data: [DONE]" ] || fail "a stream over TLS"
curl -s "$url/models" && fail "a certificate that nobody trusts was taken"
plain="http://${url#https://}"
[ "$(status "$plain/models")" = 400 ] || fail "HTTP without TLS"
grep -q 'https://' "$folder/body" || fail "what HTTP without TLS is told"
echo "ok      the server speaks TLS"

status "$url/models" -H 'x-api-key: sk-1' -H 'X-Request-Id: mine' >"$folder/status"
grep -qi '^x-request-id: mine' "$folder/head" || fail "the id of the request"
until grep -q 'path=/v1/models status=200 .*id=mine key=alice' "$folder/log"; do sleep 0.02; done
status "${url%/v1}/metrics" >"$folder/status"
grep -q 'http_responses_total{.*endpoint="/v1/models",method="GET",status_code="401"} 2' \
    "$folder/body" || fail "the count of refusals"
[ "$(status -X OPTIONS "$url/models" -H 'Origin: https://chat.example.com' \
    -H 'Access-Control-Request-Method: GET')" = 204 ] || fail "a page that may ask"
kill -TERM "$server"
wait "$server" || fail "draining ended with $?"
echo "ok      requests are logged and counted"
