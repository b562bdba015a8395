//! The server, its log and its metrics.

use super::Fate::{Ignored, Only, Refused};
use super::{Flags, flags};

const LOG: &str = "a line for each request is logged, and what the engine does; --log-level, \
                   --log-format and AQUILA_LOG say how much, and how";

/// The rows.
pub const ROWS: &[Flags] = &[
    // The server.
    flags(Refused("clients show keys, not certificates"), &["--ssl-ca-certs FILE"]),
    flags(
        Refused("the private key must not be encrypted: --ssl-keyfile with the file's mode 600"),
        &["--ssl-keyfile-password PASSWORD"],
    ),
    flags(Refused("the server speaks HTTP, not gRPC"), &["--grpc-mode"]),
    flags(Only(&["", "/"], "routes are at the root"), &["--fastapi-root-path PATH"]),
    flags(Ignored("files are not served"), &["--file-storage-path PATH"]),
    flags(
        Ignored("there is no warm-up: the first request is served as any other"),
        &["--skip-server-warmup", "--warmups NAMES"],
    ),
    flags(
        Ignored(
            "a round that hangs ends the process (--watchdog-timeout), and nothing is dumped before",
        ),
        &["--soft-watchdog-timeout SECONDS"],
    ),
    flags(Refused("give its flags themselves"), &["--config FILE"]),
    flags(
        Ignored("tokenizing is part of each request"),
        &[
            "--tokenizer-worker-num N",
            "--enable-tokenizer-batch-encode",
            "--disable-tokenizer-batch-decode",
            "--enable-dynamic-batch-tokenizer",
            "--dynamic-batch-tokenizer-batch-size N",
            "--dynamic-batch-tokenizer-batch-timeout SECONDS",
        ],
    ),
    // Logs and metrics.
    flags(
        Ignored("/metrics is always there"),
        &["--enable-metrics", "--enable-metrics-for-all-schedulers", "--collect-tokens-histogram"],
    ),
    flags(
        Ignored("/metrics has buckets and labels of its own"),
        &[
            "--enable-mfu-metrics",
            "--tokenizer-metrics-custom-labels-header NAME",
            "--tokenizer-metrics-allowed-custom-labels NAME…",
            "--bucket-time-to-first-token N…",
            "--bucket-inter-token-latency N…",
            "--bucket-e2e-request-latency N…",
            "--prompt-tokens-buckets RULE…",
            "--generation-tokens-buckets RULE…",
            "--export-metrics-to-file",
            "--export-metrics-to-file-dir FOLDER",
        ],
    ),
    flags(
        Ignored(LOG),
        &[
            "--log-level-http LEVEL",
            "--log-requests",
            "--log-requests-level N",
            "--log-requests-format NAME",
            "--log-requests-target NAME…",
            "--uvicorn-access-log-exclude-prefixes PREFIX…",
            "--enable-request-time-stats-logging",
            "--show-time-cost",
            "--decode-log-interval N",
            "--crash-dump-folder FOLDER",
            "--gc-warning-threshold-secs SECONDS",
        ],
    ),
    flags(Ignored("--otlp-traces-endpoint turns traces on"), &["--enable-trace"]),
    flags(Refused("events of the KV cache are not published"), &["--kv-events-config JSON"]),
    flags(
        Ignored("rounds that fail end their requests with a reason"),
        &["--enable-nan-detection", "--crash-on-nan"],
    ),
    flags(
        Refused("tensors are not dumped"),
        &[
            "--debug-tensor-dump-output-folder FOLDER",
            "--debug-tensor-dump-layers JSON",
            "--debug-tensor-dump-input-file FILE",
            "--debug-tensor-dump-inject VALUE",
            "--forward-hooks JSON",
            "--msprobe-dump-config FILE",
        ],
    ),
];
