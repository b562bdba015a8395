//! What drafts otherwise, and models of kinds that are not served.

use super::Fate::{Ignored, Refused};
use super::{Flags, flags};

const EXPERTS_AS_THEY_ARE: &str = "experts run on the model's device, and in one way";
const NO_IMAGES: &str = "only text is served";
const NO_MAMBA: &str = "no model with recurrent state is served";
const NO_TRANSFER: &str = "rows go over TCP, and are taken as they come";
const NO_DFLASH: &str = "its algorithm is not supported yet";
const AS_MODEL: &str =
    "what drafts is kept as the model is; it changes the speed and never the text";

/// The rows.
pub const ROWS: &[Flags] = &[
    // Speculation.
    flags(
        Ignored(AS_MODEL),
        &[
            "--speculative-draft-model-quantization FORMAT",
            "--speculative-draft-load-format FORMAT",
        ],
    ),
    flags(
        Refused(NO_DFLASH),
        &[
            "--speculative-draft-window-size N",
            "--speculative-dflash-draft-window-size N",
            "--speculative-dflash-block-size N",
            "--speculative-dspark-block-size N",
        ],
    ),
    // What has no use here, and what is not served at all.
    flags(
        Ignored(EXPERTS_AS_THEY_ARE),
        &[
            "--moe-a2a-backend NAME",
            "--moe-runner-backend NAME",
            "--speculative-moe-runner-backend NAME",
            "--speculative-moe-a2a-backend NAME",
            "--flashinfer-mxfp4-moe-precision NAME",
            "--deepep-mode NAME",
            "--deepep-config JSON",
            "--deepep-dispatcher-output-dtype NAME",
            "--enable-deepep-moe",
            "--enable-deepep-waterfill",
            "--enable-ep-moe",
            "--enable-fused-grouped-gemm-combine",
            "--enable-flashinfer-cutlass-moe",
            "--enable-flashinfer-cutedsl-moe",
            "--enable-flashinfer-trtllm-moe",
            "--enable-flashinfer-mxfp4-moe",
            "--enable-triton-kernel-moe",
            "--disable-flashinfer-cutlass-moe-fp4-allgather",
            "--disable-shared-experts-fusion",
            "--ep-num-redundant-experts N",
            "--ep-dispatch-algorithm NAME",
            "--init-expert-location NAME",
            "--enable-eplb",
            "--eplb-algorithm NAME",
            "--eplb-rebalance-num-iterations N",
            "--eplb-rebalance-layers-per-chunk N",
            "--eplb-min-rebalancing-utilization-threshold F",
            "--expert-distribution-recorder-mode NAME",
            "--expert-distribution-recorder-buffer-size N",
            "--enable-expert-distribution-metrics",
            "--expert-balancedness-report-mode MODE",
            "--moe-dense-tp-size N",
            "--elastic-ep-backend NAME",
            "--elastic-ep-rejoin",
            "--enable-elastic-expert-backup",
            "--mooncake-ib-device NAME",
            "--kt-weight-path PATH",
            "--kt-method NAME",
            "--kt-cpuinfer N",
            "--kt-threadpool-count N",
            "--kt-num-gpu-experts N",
            "--kt-max-deferred-experts-per-token N",
        ],
    ),
    flags(
        Ignored(NO_MAMBA),
        &[
            "--max-mamba-cache-size N",
            "--mamba-ssm-dtype DTYPE",
            "--mamba-full-memory-ratio F",
            "--mamba-scheduler-strategy NAME",
            "--mamba-radix-cache-strategy NAME",
            "--mamba-track-interval N",
        ],
    ),
    flags(
        Ignored(NO_TRANSFER),
        &[
            "--disaggregation-ib-device NAME",
            "--disaggregation-decode-enable-offload-kvcache",
            "--disaggregation-decode-polling-interval N",
            "--num-reserved-decode-tokens N",
        ],
    ),
    flags(Refused(NO_IMAGES), &["--enable-multimodal", "--encoder-only"]),
    flags(
        Ignored(NO_IMAGES),
        &[
            "--language-only",
            "--encoder-transfer-backend NAME",
            "--encoder-urls JSON",
            "--mm-max-concurrent-calls N",
            "--mm-per-request-timeout SECONDS",
            "--mm-process-config JSON",
            "--mm-enable-dp-encoder",
            "--limit-mm-data-per-request JSON",
            "--enable-mm-global-cache",
            "--enable-broadcast-mm-inputs-process",
            "--enable-prefix-mm-cache",
            "--keep-mm-feature-on-device",
            "--disable-fast-image-processor",
            "--enable-precise-embedding-interpolation",
        ],
    ),
    flags(
        Refused("no model that generates by diffusion is served"),
        &["--dllm-algorithm NAME", "--dllm-algorithm-config FILE"],
    ),
    flags(
        Refused("answers are not matched to those of a training system"),
        &["--rl-on-policy-target NAME"],
    ),
];
