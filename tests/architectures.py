#!/usr/bin/env python3
"""Compares architectures with transformers over configs that nobody has written a fixture for.

Each variant is a small model with random weights in bfloat16, made and run in float32 by
transformers; our example `compare` then runs the same folder and reports how far its logits are
off and whether its greedy ids are the same.

    pip install torch transformers
    python3 tests/architectures.py [WORD]      # only variants whose name has WORD in it
    python3 tests/architectures.py --write FOLDER NAME   # keeps one variant as a fixture
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import save_file

transformers.utils.logging.disable_progress_bar()

PROMPT, ANSWER = 40, 24

COMMON = dict(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
    bos_token_id=0, eos_token_id=1, pad_token_id=2,
)
MOE = dict(COMMON, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2)
GEMMA = dict(COMMON, num_hidden_layers=4, sliding_window=16, query_pre_attn_scalar=32)

YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0,
            original_max_position_embeddings=64)
LINEAR = dict(rope_type="linear", rope_theta=1e6, factor=8.0)
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=64)


def variants():
    """Name, config class, its arguments, and fields that are changed in the file afterwards."""
    moe, gemma = transformers.Qwen3MoeConfig, transformers.Gemma3TextConfig
    for name, change in {
        "plain": {},
        "norm_topk_prob": dict(norm_topk_prob=True),
        "one expert": dict(num_experts_per_tok=1),
        "all experts": dict(num_experts_per_tok=8, norm_topk_prob=True),
        "one of one": dict(num_experts=1, num_experts_per_tok=1),
        "many experts": dict(num_experts=60, num_experts_per_tok=7),
        "no experts": dict(num_experts=0),
        "mlp_only_layers": dict(mlp_only_layers=[1]),
        "first and last dense": dict(mlp_only_layers=[0, 2], norm_topk_prob=True),
        "decoder_sparse_step 2": dict(decoder_sparse_step=2),
        "decoder_sparse_step 3": dict(decoder_sparse_step=3, mlp_only_layers=[2]),
        "odd widths": dict(moe_intermediate_size=19, hidden_size=52, intermediate_size=33),
        "attention_bias": dict(attention_bias=True),
        "tied": dict(tie_word_embeddings=True),
        "gelu": dict(hidden_act="gelu_pytorch_tanh"),
        "window": dict(use_sliding_window=True, sliding_window=11),
        "unused window": dict(use_sliding_window=False, sliding_window=11),
        "yarn": dict(rope_parameters=YARN),
        "linear": dict(rope_parameters=LINEAR),
        "epsilon": dict(rms_norm_eps=1e-3),
        "one kv head": dict(num_key_value_heads=1),
        "as many kv heads": dict(num_key_value_heads=4),
        "head_dim": dict(head_dim=16),
    }.items():
        yield f"qwen3-moe {name}", moe, dict(MOE, **change), {}
    yield "qwen3-moe older names", moe, MOE, {"num_experts": 8, "num_local_experts": None}
    for name, change in {
        "plain": {},
        "pattern": dict(num_hidden_layers=7),
        "all full": dict(layer_types=["full_attention"] * 4),
        "all sliding": dict(layer_types=["sliding_attention"] * 4),
        "full first": dict(layer_types=["full_attention", "sliding_attention"] * 2),
        "window 1": dict(sliding_window=1),
        "window 39": dict(sliding_window=39),
        "window 1000": dict(sliding_window=1000),
        "untied": dict(tie_word_embeddings=False),
        "attention_bias": dict(attention_bias=True),
        "silu": dict(hidden_activation="silu"),
        "scalar": dict(query_pre_attn_scalar=100),
        "final cap": dict(final_logit_softcapping=3.0),
        "odd widths": dict(intermediate_size=33, hidden_size=52),
        "head_dim": dict(head_dim=16),
        "epsilon": dict(rms_norm_eps=1e-3),
        "linear full": dict(rope_parameters={
            "full_attention": LINEAR, "sliding_attention": dict(rope_type="default")}),
        "scaled both": dict(rope_parameters={
            "full_attention": LLAMA3, "sliding_attention": dict(YARN)}),
        "bases": dict(rope_parameters={
            "full_attention": dict(rope_type="default", rope_theta=5e5),
            "sliding_attention": dict(rope_type="default", rope_theta=2e4)}),
    }.items():
        yield f"gemma3 {name}", gemma, dict(GEMMA, **change), {}
    # As the family's first checkpoints were published: no list of layers, one base a field.
    older = {"layer_types": None, "rope_parameters": None, "sliding_window_pattern": 2,
             "rope_theta": 3e5, "rope_local_base_freq": 2e4,
             "rope_scaling": dict(rope_type="linear", factor=8.0)}
    yield "gemma3 older fields", gemma, dict(
        GEMMA, layer_types=["sliding_attention", "full_attention"] * 2, rope_parameters={
            "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=3e5),
            "sliding_attention": dict(rope_type="default", rope_theta=2e4)}), older
    for family, config in (("qwen2", transformers.Qwen2Config), ("qwen3", transformers.Qwen3Config)):
        base = {k: v for k, v in COMMON.items() if family == "qwen3" or k != "head_dim"}
        window = dict(use_sliding_window=True, sliding_window=11)
        yield f"{family} window", config, dict(base, max_window_layers=1, **window), {}
        yield f"{family} layer types", config, dict(base, layer_types=[
            "sliding_attention", "full_attention", "sliding_attention"], **window), {}
        yield f"{family} gelu", config, dict(base, hidden_act="gelu_pytorch_tanh"), {}


def make(folder, config_class, arguments, changes, seed):
    """A random model, and what transformers makes of a prompt."""
    torch.manual_seed(seed)
    config = config_class(**arguments)
    model = transformers.AutoModelForCausalLM.from_config(config)
    gemma = config.model_type.startswith("gemma")
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn_like(tensor)
            if "norm" in name:
                tensor.copy_(noise * 0.2 + (0.0 if gemma else 1.0))
            elif name.endswith("bias"):
                tensor.copy_(noise * 0.1)
            else:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text())
    for field, value in changes.items():
        if value is None:
            written.pop(field, None)
        else:
            written[field] = value
    path.write_text(json.dumps(written, indent=1))
    # Read back: rotary frequencies must not have gone through bfloat16, and the changed config
    # must mean the same to transformers.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.set_experts_implementation("eager")
    routed = {}
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            def keep(_module, _given, out, number=number):
                routed.setdefault(number, out[2].clone())
            layer.mlp.gate.register_forward_hook(keep)
    ids = torch.randint(3, config.vocab_size, (PROMPT,))
    with torch.no_grad():
        out = model(ids[None], output_hidden_states=True)
        text = ids.clone()
        for _ in range(ANSWER):
            text = torch.cat([text, model(text[None]).logits[0, -1].argmax()[None]])
    tensors = {}
    if routed:
        none = torch.zeros_like(next(iter(routed.values())))
        layers = [routed.get(number, none) for number in range(config.num_hidden_layers)]
        tensors["routed_experts"] = torch.stack(layers, 1).long().contiguous()
    save_file(tensors | {
        "input_ids": ids, "greedy_ids": text[PROMPT:].clone(), "logits": out.logits[0].clone(),
        "last_hidden": out.hidden_states[-1][0].clone(),
    }, folder / "golden.safetensors")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("word", nargs="?", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", nargs=2, metavar=("FOLDER", "NAME"))
    options = parser.parse_args()
    if options.write:
        folder, name = options.write
        made = next(v for v in variants() if v[0] == name)
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        make(pathlib.Path(folder), *made[1:], options.seed)
        return 0
    with tempfile.TemporaryDirectory() as root:
        folders = []
        for name, *rest in variants():
            if options.word in name:
                folder = pathlib.Path(root) / name.replace(" ", "-")
                folder.mkdir()
                make(folder, *rest, options.seed)
                folders.append(str(folder))
        command = ["cargo", "run", "--quiet", "-p", "aquila-model", "--example", "compare", "--"]
        return subprocess.run(command + folders).returncode


sys.exit(main())
