"""llama.cpp through llama-cpp-python's low-level interface: batches of sequences, ids in and out."""

import ctypes
import time

import llama_cpp
import numpy as np

# Kept here because llama.cpp calls it for as long as the process lives.
_quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)


class Model:
    """A GGUF file."""

    def __init__(self, path):
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.handle = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise SystemExit(f"llama.cpp does not load {path}")
        vocab = llama_cpp.llama_model_get_vocab(self.handle)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(vocab)


class Context:
    """Room for `batch` sequences of up to `length` tokens."""

    def __init__(self, model, batch, length, threads, flash_attention, unified):
        self.model, self.batch = model, batch
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = batch * (-(-length // 256) * 256)
        params.n_batch = params.n_ctx
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if flash_attention
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.kv_unified = unified
        self.handle = llama_cpp.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise SystemExit("llama.cpp makes no context")
        self.room = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def close(self):
        llama_cpp.llama_batch_free(self.room)
        llama_cpp.llama_free(self.handle)

    def clear(self):
        """Forgets every sequence."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.handle), False)

    def decode(self, rows):
        """Runs rows of (token, position, sequence, whether its logits are wanted)."""
        self.room.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            self.room.token[i] = token
            self.room.pos[i] = position
            self.room.n_seq_id[i] = 1
            self.room.seq_id[i][0] = sequence
            self.room.logits[i] = wanted
        if llama_cpp.llama_decode(self.handle, self.room) != 0:
            raise SystemExit("llama.cpp does not decode")
        llama_cpp.llama_synchronize(self.handle)

    def logits(self, row):
        """The logits of a row of the last batch, where llama.cpp keeps them."""
        pointer = llama_cpp.llama_get_logits_ith(self.handle, row)
        return np.ctypeslib.as_array(pointer, (self.model.vocabulary,))

    def log_probabilities(self, tokens, first):
        """Log-probabilities after each of tokens[first:], of one sequence."""
        self.clear()
        self.decode([(t, i, 0, i >= first) for i, t in enumerate(tokens)])
        rows = np.stack([self.logits(i) for i in range(first, len(tokens))]).astype(np.float64)
        highest = rows.max(axis=1, keepdims=True)
        return rows - highest - np.log(np.exp(rows - highest).sum(axis=1, keepdims=True))

    def run(self, prompts, tokens):
        """Tokens per second of greedy decoding, after all prompts were read, and of reading."""
        self.clear()
        rows, last = [], []
        for sequence, prompt in enumerate(prompts):
            rows += [(t, i, sequence, i + 1 == len(prompt)) for i, t in enumerate(prompt)]
            last.append(len(rows) - 1)
        began = time.perf_counter()
        self.decode(rows)
        chosen = [int(self.logits(row).argmax()) for row in last]
        read = time.perf_counter()
        for step in range(1, tokens):
            position = len(prompts[0]) + step - 1
            self.decode([(t, position, s, True) for s, t in enumerate(chosen)])
            chosen = [int(self.logits(row).argmax()) for row in range(len(chosen))]
        ended = time.perf_counter()
        decoded = (tokens - 1) * len(prompts)
        return decoded / (ended - read), len(rows) / (read - began)
