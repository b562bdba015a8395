"""One random Llama checkpoint of the shape of `preset:bench`, in each engine's own format.

The invariant: all files hold the same bfloat16 weights. The Hugging Face folder is made first; the
GGUF files are converted from it.
"""

import json
from pathlib import Path

import gguf
import numpy as np

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

# Hugging Face names of a layer's tensors, and GGUF's.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def shapes():
    """Every tensor by its Hugging Face name."""
    hidden, ffn, vocab = (
        CONFIG[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    q = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    kv = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    all_shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for index in range(CONFIG["num_hidden_layers"]):
        for name, shape in layer.items():
            all_shapes[f"model.layers.{index}.{name}.weight"] = shape
    all_shapes["model.norm.weight"] = (hidden,)
    all_shapes["lm_head.weight"] = (vocab, hidden)
    return all_shapes


def to_bf16(values):
    """float32 as bfloat16 bits, rounded half to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    """bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def make_folder(folder: Path, seed=0):
    """Writes a Hugging Face folder of random weights, unless it is there."""
    weights = folder / "model.safetensors"
    if weights.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes().items():
        size = 2 * int(np.prod(shape))
        header[name] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(seed)
    partial = weights.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes().values():
            if len(shape) == 1:
                values = 1 + 0.1 * random.standard_normal(shape, dtype=np.float32)
            else:
                values = 0.02 * random.standard_normal(shape, dtype=np.float32)
            file.write(to_bf16(values).tobytes())
    partial.rename(weights)


def read_folder(folder: Path):
    """Names and float32 values of a folder's tensors, one after the other."""
    path = folder / "model.safetensors"
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            bits = np.asarray(data[begin:end]).view(np.uint16)
            yield name, from_bf16(bits).reshape(entry["shape"])


def paired(weight, heads):
    """Rows of queries or keys in the order of llama.cpp's rotation.

    Hugging Face turns element i of a head with element i + d/2; llama.cpp's `llama` architecture
    turns elements 2i and 2i + 1.
    """
    rows, inputs = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, inputs)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, inputs)


def gguf_tensor(name, value):
    """The GGUF name and values of a Hugging Face tensor."""
    outside = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outside:
        return outside[name], value
    _, _, index, *rest = name.split(".")
    part = ".".join(rest[:-1])
    if part == "self_attn.q_proj":
        value = paired(value, CONFIG["num_attention_heads"])
    elif part == "self_attn.k_proj":
        value = paired(value, CONFIG["num_key_value_heads"])
    return f"blk.{index}.{LAYER_NAMES[part]}.weight", value


def convert(folder: Path, path: Path, kind: gguf.GGMLQuantizationType):
    """Writes a folder as GGUF with matrices of `kind`, unless the file is there."""
    if path.exists():
        return
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_name("bench")
    writer.add_vocab_size(CONFIG["vocab_size"])
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_key_length(CONFIG["head_dim"])
    writer.add_value_length(CONFIG["head_dim"])
    writer.add_rope_dimension_count(CONFIG["head_dim"])
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    # Ids go in and out, so there is no text.
    writer.add_tokenizer_model("none")
    for name, value in read_folder(folder):
        name, value = gguf_tensor(name, value)
        if value.ndim == 1:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
