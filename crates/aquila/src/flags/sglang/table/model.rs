//! The model, its files and its tokenizer.

use super::Fate::{Ignored, Only, Refused};
use super::{Flags, flags};

const NO_LORA: &str = "LoRA adapters are not supported";

/// The rows.
pub const ROWS: &[Flags] = &[
    flags(Ignored("no code of a model is ever run"), &["--trust-remote-code"]),
    flags(Ignored("there is one tokenizer, a fast one"), &["--tokenizer-mode MODE"]),
    flags(
        Refused("a model with a tokenizer uses it; token ids are taken beside text"),
        &["--skip-tokenizer-init"],
    ),
    flags(Ignored("HF_HOME says where models of the hub are"), &["--download-dir FOLDER"]),
    flags(Only(&["auto"], "models are Aquila's own"), &["--model-impl NAME"]),
    flags(Only(&["{}"], "config.json is taken as it is"), &["--json-model-override-args JSON"]),
    flags(Refused("checksums are not checked"), &["--model-checksum [FILE]"]),
    flags(Refused("only models that generate text are served"), &["--is-embedding"]),
    flags(
        Ignored("weights are mapped from their files"),
        &[
            "--model-loader-extra-config JSON",
            "--weight-loader-disable-mmap",
            "--weight-loader-prefetch-checkpoints",
            "--weight-loader-prefetch-num-threads N",
        ],
    ),
    flags(
        Refused("weights come from the model's folder"),
        &[
            "--custom-weight-loader NAME…",
            "--remote-instance-weight-loader-seed-instance-ip IP",
            "--remote-instance-weight-loader-seed-instance-service-port PORT",
            "--remote-instance-weight-loader-send-weights-group-ports JSON",
            "--remote-instance-weight-loader-backend NAME",
            "--remote-instance-weight-loader-start-seed-via-transfer-engine",
            "--checkpoint-engine-wait-weights-before-ready",
            "--decrypted-config-file FILE",
            "--decrypted-draft-config-file FILE",
            "--delete-ckpt-after-loading",
        ],
    ),
    flags(
        Refused("weights stay loaded"),
        &[
            "--enable-memory-saver",
            "--enable-weights-cpu-backup",
            "--enable-draft-weights-cpu-backup",
        ],
    ),
    flags(
        Refused("the one quantization is --quantization int8"),
        &[
            "--quantization-param-path FILE",
            "--modelopt-quant NAME",
            "--modelopt-checkpoint-restore-path PATH",
            "--modelopt-checkpoint-save-path PATH",
            "--modelopt-export-path PATH",
            "--quantize-and-serve",
            "--rl-quant-profile PATH",
            "--torchao-config NAME",
        ],
    ),
    flags(Ignored("logits are float32 always"), &["--enable-fp32-lm-head"]),
    flags(
        Refused("LoRA adapters are not supported"),
        &[
            "--enable-lora",
            "--lora-paths PATH…",
            "--max-lora-rank N",
            "--lora-target-modules NAME…",
        ],
    ),
    flags(
        Ignored(NO_LORA),
        &[
            "--enable-lora-overlap-loading",
            "--max-loras-per-batch N",
            "--max-loaded-loras N",
            "--lora-eviction-policy NAME",
            "--lora-backend NAME",
            "--max-lora-chunk-size N",
            "--lora-drain-wait-threshold SECONDS",
        ],
    ),
];
