//! How requests are scheduled, what is cached, and what answers look like.

use super::Fate::{Ignored, Only, Refused};
use super::{Flags, flags};

const KV_IN_MEMORY: &str = "keys and values are in the host's memory already";

/// The rows.
pub const ROWS: &[Flags] = &[
    // Scheduling and caching.
    flags(
        Ignored("--chunked-prefill-size bounds the prompt tokens of a round"),
        &["--max-prefill-tokens N", "--prefill-max-requests N"],
    ),
    flags(Ignored("rounds mix prompts and decoding always"), &["--enable-mixed-chunk"]),
    flags(
        Ignored("a round is one step; slots are reserved as requests need them"),
        &[
            "--schedule-conservativeness F",
            "--num-continuous-decode-steps N",
            "--scheduler-recv-interval N",
            "--sleep-on-idle",
        ],
    ),
    flags(Ignored("prefixes are evicted by least recent use"), &["--radix-eviction-policy NAME"]),
    flags(
        Ignored("all layers of a model share one pool; pages behind a window are kept"),
        &["--swa-full-tokens-ratio F", "--disable-hybrid-swa-memory", "--hybrid-kvcache-ratio F"],
    ),
    flags(
        Ignored(KV_IN_MEMORY),
        &[
            "--enable-hierarchical-cache",
            "--hicache-ratio F",
            "--hicache-size N",
            "--hicache-write-policy NAME",
            "--hicache-io-backend NAME",
            "--hicache-mem-layout NAME",
            "--hicache-storage-backend NAME",
            "--hicache-storage-prefetch-policy NAME",
            "--hicache-storage-backend-extra-config JSON",
            "--enable-lmcache",
        ],
    ),
    flags(
        Refused("attention is never sparse"),
        &["--hierarchical-sparse-attention-extra-config JSON"],
    ),
    flags(
        Ignored("the same request always has the same answer"),
        &["--enable-deterministic-inference"],
    ),
    // What answers look like.
    flags(Ignored("tokens are sent as rounds bring them"), &["--stream-interval N"]),
    flags(
        Refused("events of /generate hold the whole text so far, as by default in SGLang"),
        &["--incremental-streaming-output", "--stream-output"],
    ),
    flags(Ignored("usage always says how many tokens were cached"), &["--enable-cache-report"]),
    flags(
        Refused("put the template into the model's folder, as chat_template.jinja"),
        &["--chat-template FILE"],
    ),
    flags(
        Refused("the model's default template is used"),
        &["--hf-chat-template-name NAME", "--completion-template FILE"],
    ),
    flags(Refused("tools are the client's: calls are answered by it"), &["--tool-server URLS"]),
    flags(
        Only(
            &["model"],
            "defaults are those of the model's generation_config.json; --temperature, \
                          --top-p and the like change them",
        ),
        &["--sampling-defaults WHOSE"],
    ),
    flags(
        Refused("--temperature, --top-p and the like give defaults"),
        &["--preferred-sampling-params JSON"],
    ),
    flags(Only(&["default"], "weights have no version here"), &["--weight-version NAME"]),
    flags(
        Ignored("llguidance compiles grammars of every kind"),
        &[
            "--grammar-backend NAME",
            "--constrained-json-whitespace-pattern REGEX",
            "--constrained-json-disable-any-whitespace",
            "--disable-outlines-disk-cache",
        ],
    ),
    flags(Refused("prompts beyond the context are refused, never cut"), &["--allow-auto-truncate"]),
    flags(Refused("no code of a client is ever run"), &["--enable-custom-logit-processor"]),
    flags(Refused("scoring is not served"), &["--multi-item-scoring-delimiter N"]),
];
