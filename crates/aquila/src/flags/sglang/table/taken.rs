//! Flags of SGLang's that Aquila has.

use super::Fate::Taken;
use super::{Flags, flags};

/// The rows.
pub const ROWS: &[Flags] = &[
    flags(
        Taken(""),
        &[
            "--model-path MODEL",
            "--model MODEL",
            "--revision REVISION",
            "--context-length N",
            "--random-seed N",
            "--max-running-requests N",
            "--max-queued-requests N",
            "--max-total-tokens N",
            "--chunked-prefill-size N",
            "--page-size N",
            "--disable-radix-cache",
            "--disable-overlap-schedule",
            "--enable-priority-scheduling",
            "--abort-on-priority-when-disabled",
            "--schedule-low-priority-values-first",
            "--priority-scheduling-preemption-threshold N",
            "--host ADDRESS",
            "--port N",
            "--api-key KEY",
            "--admin-api-key KEY",
            "--ssl-certfile FILE",
            "--ssl-keyfile FILE",
            "--served-model-name NAME",
            "--enable-return-hidden-states",
            "--disaggregation-mode MODE",
            "--disaggregation-bootstrap-port PORT",
        ],
    ),
    flags(
        Taken("`tcp` or `nixl`; others are refused by name"),
        &["--disaggregation-transfer-backend NAME"],
    ),
    flags(
        Taken("qwen25, qwen, hermes, llama3 or mistral; any other is refused"),
        &["--tool-call-parser NAME"],
    ),
    flags(
        Taken("deepseek-r1, qwen3 or qwen3-thinking; any other is refused"),
        &["--reasoning-parser NAME"],
    ),
    flags(
        Taken("`http://HOST:PORT`: spans go over HTTP, not gRPC"),
        &["--otlp-traces-endpoint ADDRESS"],
    ),
    flags(Taken("refused for a model without experts"), &["--enable-return-routed-experts"]),
    flags(
        Taken("of the memory that is free at start, on the device that the model runs on"),
        &["--mem-fraction-static F"],
    ),
    flags(Taken("auto, cpu, cuda or cuda:INDEX"), &["--device DEVICE"]),
    flags(Taken("debug, info, warning, error or critical"), &["--log-level LEVEL"]),
    flags(
        Taken("of a round on the device; 0 is no limit, which is the default on the CPU"),
        &["--watchdog-timeout SECONDS"],
    ),
    flags(
        Taken("where it is the model; any other is refused: put tokenizer.json into its folder"),
        &["--tokenizer-path PATH"],
    ),
    flags(Taken("auto, bfloat16 or float32; float16 and half mean bfloat16"), &["--dtype DTYPE"]),
    flags(Taken("auto, bfloat16 or float32"), &["--kv-cache-dtype DTYPE"]),
    flags(Taken("int8; any other is refused"), &["--quantization FORMAT"]),
    flags(Taken("auto, safetensors or dummy; any other is refused"), &["--load-format FORMAT"]),
    flags(Taken("fcfs or lpm; any other is refused"), &["--schedule-policy POLICY"]),
    flags(
        Taken(
            "EAGLE, EAGLE3, NEXTN, STANDALONE and NGRAM; EAGLE means MTP where the draft is MTP \
             layers; DFLASH, DSPARK and FROZEN_KV_MTP are refused",
        ),
        &["--speculative-algorithm NAME", "--speculative-algo NAME"],
    ),
    flags(
        Taken(""),
        &[
            "--speculative-draft-model-path MODEL",
            "--speculative-draft-model MODEL",
            "--speculative-draft MODEL",
            "--speculative-draft-model-revision REVISION",
            "--speculative-num-steps N",
            "--speculative-eagle-topk N",
            "--speculative-num-draft-tokens N",
            "--speculative-token-map FILE",
            "--speculative-ngram-min-bfs-breadth N",
            "--speculative-ngram-max-bfs-breadth N",
            "--speculative-ngram-match-type TYPE",
            "--speculative-ngram-max-trie-depth N",
            "--speculative-ngram-capacity N",
            "--speculative-ngram-external-corpus-path FILE",
            "--speculative-ngram-external-corpus-max-tokens N",
            "--speculative-use-rejection-sampling",
        ],
    ),
    flags(
        Taken(
            "beside it, --speculative-eagle-topk is 1 and --speculative-num-draft-tokens is \
             --speculative-num-steps plus 1; any other is refused",
        ),
        &["--speculative-adaptive"],
    ),
    flags(
        Taken(
            "also sglang, the table in SGLang's code, and sglang-published, the one in its \
             documentation",
        ),
        &["--speculative-adaptive-config FILE"],
    ),
    flags(
        Taken("they mean --speculative-verify target-only"),
        &["--speculative-accept-threshold-single P", "--speculative-accept-threshold-acc P"],
    ),
    flags(Taken("a head with several layers is run so by itself"), &["--enable-multi-layer-eagle"]),
];
