//! A report as lines for people.

use std::fmt;

use super::{DraftHead, Inspection};
use crate::memory::ByteSize;

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |what: &str, value: Option<String>| match value {
            Some(value) => writeln!(f, "{what:<14} {value}"),
            None => Ok(()),
        };
        line("model", Some(self.location.clone()))?;
        line("architecture", self.architecture.clone())?;
        line("parameters", self.parameters.map(count))?;
        line("dtype", self.dtype.clone())?;
        line("vocabulary", self.vocab_size.map(|n| n.to_string()))?;
        let tied = if self.tied_embeddings == Some(true) { ", tied embeddings" } else { "" };
        line("hidden size", self.hidden_size.map(|n| format!("{n}{tied}")))?;
        line("feed-forward", self.intermediate_size.map(|n| n.to_string()))?;
        line("layers", self.layers.map(|n| n.to_string()))?;
        let heads = self.heads.zip(self.kv_heads).zip(self.head_dim);
        line("heads", heads.map(|((q, kv), d)| format!("{q}, {kv} for keys and values, of {d}")))?;
        line("rope", self.rope.clone())?;
        line("window", self.window.map(|n| format!("{n} positions, in layers that have one")))?;
        line("experts", self.experts.clone())?;
        line("draft head", self.draft_head.as_ref().map(DraftHead::to_string))?;
        if let Some(head) = &self.draft_head {
            line("layer numbers", head.aux_layer_convention.clone())?;
            let particulars = head.particulars.join("; ");
            line("particulars", (!particulars.is_empty()).then_some(particulars))?;
            line("known by", head.known_by.map(str::to_owned))?;
        }
        line("context", self.context_length.map(|n| n.to_string()))?;
        let eos = self.eos_token_ids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        line("end of text", Some(if eos.is_empty() { "none".into() } else { eos }))?;
        let without = "none: prompts are token ids";
        line("tokenizer", Some(if self.tokenizer { "tokenizer.json" } else { without }.into()))?;
        for (i, file) in self.files.iter().enumerate() {
            let what = if i == 0 { "files" } else { "" };
            line(what, Some(format!("{} ({})", file.name, ByteSize(file.bytes))))?;
        }
        if let Some(m) = &self.memory {
            let [bf16, int8] = [m.weights_bf16, m.weights_int8].map(ByteSize);
            line("weights", Some(format!("{bf16} as bfloat16, {int8} as int8")))?;
            let [f32, bf16, full] =
                [m.kv_per_token_f32, m.kv_per_token_bf16, m.kv_of_a_context_f32].map(ByteSize);
            let text = format!("{f32} per token as float32, {bf16} as bfloat16; {full} a context");
            line("kv cache", Some(text))?;
        }
        let verdict = match &self.reason {
            None => "yes".to_owned(),
            Some(reason) => format!("no: {reason}"),
        };
        line("servable", Some(verdict))
    }
}

/// A number of parameters for people.
fn count(n: u64) -> String {
    match n {
        0..1_000_000 => n.to_string(),
        1_000_000..1_000_000_000 => format!("{:.1} M ({n})", n as f64 / 1e6),
        _ => format!("{:.2} B ({n})", n as f64 / 1e9),
    }
}
