//! Values of Aquila's flags that only SGLang has.

use super::{ValueFate, Values};

/// Values of flags that Aquila has.
pub const VALUES: &[Values] = &[
    Values {
        flag: "--dtype",
        values: &["float16", "half"],
        fate: ValueFate::Means(
            "bfloat16",
            "there is no float16 on this backend, and bfloat16 takes as much memory; --dtype \
             float32 keeps every digit of a float16 checkpoint",
        ),
    },
    Values {
        flag: "--load-format",
        values: &["safetensors"],
        fate: ValueFate::Means("auto", "it reads safetensors first"),
    },
    Values {
        flag: "--load-format",
        values: &[
            "pt",
            "npcache",
            "sharded_state",
            "gguf",
            "bitsandbytes",
            "layered",
            "flash_rl",
            "remote",
            "remote_instance",
            "fastsafetensors",
            "private",
            "runai_streamer",
        ],
        fate: ValueFate::Refused(
            "weights are read from safetensors or, where there are none, from torch's files (auto), \
             or are random (dummy)",
        ),
    },
    Values {
        flag: "--quantization",
        values: &[
            "awq",
            "fp8",
            "gptq",
            "marlin",
            "gptq_marlin",
            "awq_marlin",
            "bitsandbytes",
            "gguf",
            "modelopt",
            "modelopt_fp8",
            "modelopt_fp4",
            "petit_nvfp4",
            "w8a8_int8",
            "w8a8_fp8",
            "moe_wna16",
            "qoq",
            "w4afp8",
            "mxfp4",
            "mxfp8",
            "auto-round",
            "compressed-tensors",
            "modelslim",
            "quark_int4fp8_moe",
        ],
        fate: ValueFate::Refused(
            "the one quantization is int8, made from a checkpoint that is not quantized",
        ),
    },
    Values {
        flag: "--kv-cache-dtype",
        values: &["fp8_e5m2", "fp8_e4m3", "fp4_e2m1"],
        fate: ValueFate::Refused("keys and values are kept as float32 or bfloat16"),
    },
    Values {
        flag: "--schedule-policy",
        values: &["random", "dfs-weight", "lof", "routing-key"],
        fate: ValueFate::Refused(
            "requests are admitted in the order in which they came (fcfs) or by the longest cached \
             prefix (lpm)",
        ),
    },
    Values {
        flag: "--schedule-policy",
        values: &["priority"],
        fate: ValueFate::Refused("give --enable-priority-scheduling instead"),
    },
];
