//! What publishers call the tensors of their MTP layers.

/// A family of checkpoints with MTP layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MtpNaming {
    /// `model.mtp_layers.N`, the hidden state before the embedding.
    MiMo,
    /// `model.layers.N` beyond the model's own (DeepSeek, GLM), or from 0 in exports of the layer
    /// alone.
    NextN,
    /// `mtp`, one layer, with norms whose weights are kept less one.
    Qwen,
}

/// Families that are not supported yet: what some of their tensors' names have in them, and whose
/// they are.
const OTHERS: [(&str, &str); 2] = [
    (
        "model.mtp.layers.",
        "MiMo-V2, which attend within a window, with sinks and with values of another width than \
         keys",
    ),
    ("mtp_linear_proj.", "Ernie 4.5"),
];

/// What is not supported about MTP layers that belong to none of the families here, if these names
/// are of such.
pub(super) fn other_family(names: &[&str]) -> Option<String> {
    let is_there = |mark: &str| names.iter().any(|name| name.contains(mark));
    let (_, family) = OTHERS.into_iter().find(|(mark, _)| is_there(mark))?;
    Some(format!("has the MTP layers of {family}: not supported yet"))
}

/// The names of what a layer has beside its block.
pub(super) struct Parts {
    pub embedding_norm: String,
    pub hidden_norm: String,
    pub join: String,
    pub output_norm: String,
}

impl MtpNaming {
    /// The family that the names of a checkpoint show, if they show one.
    pub(super) fn of(names: &[&str]) -> Option<Self> {
        [Self::MiMo, Self::NextN, Self::Qwen]
            .into_iter()
            .find(|naming| names.iter().any(|name| naming.number(name).is_some()))
    }

    /// The numbers of all layers, ascending.
    pub(super) fn numbers(self, names: &[&str]) -> Vec<usize> {
        let mut numbers: Vec<usize> = names.iter().filter_map(|name| self.number(name)).collect();
        numbers.sort_unstable();
        numbers
    }

    /// The number of the layer whose joining projection is called `name`.
    fn number(self, name: &str) -> Option<usize> {
        let (start, end) = match self {
            Self::MiMo => ("model.mtp_layers.", ".input_proj.weight"),
            Self::NextN => ("model.layers.", ".eh_proj.weight"),
            Self::Qwen => return (name == "mtp.fc.weight").then_some(0),
        };
        name.strip_prefix(start)?.strip_suffix(end)?.parse().ok()
    }

    /// How the names of the block of layer `number` begin.
    pub(super) fn layer(self, number: usize) -> String {
        match self {
            Self::MiMo => format!("model.mtp_layers.{number}"),
            Self::NextN => format!("model.layers.{number}"),
            Self::Qwen => format!("mtp.layers.{number}"),
        }
    }

    pub(super) fn parts(self, number: usize) -> Parts {
        let prefix = match self {
            Self::Qwen => "mtp".into(),
            _ => self.layer(number),
        };
        let names = match self {
            Self::MiMo => ["token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"],
            Self::NextN => ["enorm", "hnorm", "eh_proj", "shared_head.norm"],
            Self::Qwen => ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"],
        };
        let [embedding_norm, hidden_norm, join, output_norm] =
            names.map(|name| format!("{prefix}.{name}.weight"));
        Parts { embedding_norm, hidden_norm, join, output_norm }
    }

    /// Whether the hidden state comes before the embedding where both are joined.
    pub fn hidden_first(self) -> bool {
        self == Self::MiMo
    }

    /// Whether the weights of norms are kept less one.
    pub fn norms_from_one(self) -> bool {
        self == Self::Qwen
    }
}
