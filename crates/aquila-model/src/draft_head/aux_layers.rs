//! Which hidden states of a target an EAGLE-3 head reads.
//!
//! Publishers number them in two ways: by the layer whose output is read, or by the boundary
//! before a layer, so that 0 is the embedding and L is the output of the last of L layers. The
//! numbers alone do not always say which; who numbered them mostly does.

use crate::config::{Settings, shown};
use crate::{Result, Setting};

/// The setting that says which layers of the target are read.
pub(super) const LAYER_IDS: &str = "eagle_aux_hidden_state_layer_ids";

/// How many layers are read where the config is silent.
pub(super) const USUAL_COUNT: usize = 3;

/// How the layers are numbered whose hidden states a head reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AuxLayerConvention {
    /// As the numbers force, else as the publisher of the head does.
    #[default]
    Auto,
    /// By the layer whose output is read (SGLang, SpecForge).
    Output,
    /// By the boundary before a layer (vLLM, speculators).
    Boundary,
}

/// The layers that a config names, and whose way of numbering them it follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuxLayers {
    /// The numbers as they stand; none means the usual three.
    pub ids: Option<Vec<usize>>,
    /// The convention asked for.
    pub asked: AuxLayerConvention,
    /// Whether the head was published in the manner of vLLM and speculators.
    pub by_boundary: bool,
}

impl AuxLayers {
    /// Reads the numbers where publishers put them: in `eagle_config` or at the top.
    pub(super) fn read(
        config: &Settings<'_>,
        eagle: Option<&Settings<'_>>,
        asked: AuxLayerConvention,
        by_boundary: bool,
    ) -> Result<Self> {
        let places = [(eagle, LAYER_IDS), (eagle, "layer_ids"), (Some(config), LAYER_IDS)];
        let mut given = places.into_iter().filter_map(|(settings, field)| {
            settings.filter(|s| s.get(field).is_some()).map(|s| ids(s, field))
        });
        Ok(Self { ids: given.next().transpose()?, asked, by_boundary })
    }

    /// The convention that holds for a target of `layers` layers, where that is known, and why.
    pub fn convention(&self, layers: Option<usize>) -> (AuxLayerConvention, &'static str) {
        let ids = self.ids.as_deref().unwrap_or_default();
        if self.asked != AuxLayerConvention::Auto {
            return (self.asked, "as asked for");
        }
        if layers.is_some_and(|layers| ids.last() == Some(&layers)) {
            let why = "the last number is that of the end of the last layer";
            return (AuxLayerConvention::Boundary, why);
        }
        if self.by_boundary {
            (AuxLayerConvention::Boundary, "as vLLM and speculators number them")
        } else {
            (AuxLayerConvention::Output, "as SGLang and SpecForge number them")
        }
    }

    /// The boundaries of a target of `layers` layers whose hidden states are read: 0 is the
    /// embedding, any other the end of the layer before it.
    pub(super) fn boundaries(&self, config: &Settings<'_>, layers: usize) -> Result<Vec<usize>> {
        let Some(ids) = &self.ids else {
            // EAGLE's own choice: the inputs of layers 2, L / 2 and L - 3.
            return match layers {
                5.. => Ok(vec![2, layers / 2, layers - 3]),
                _ => Err(config.wrong(
                    LAYER_IDS,
                    format!(
                        "is missing, and the usual layers do not exist in a target of {layers}"
                    ),
                )),
            };
        };
        let (convention, _) = self.convention(Some(layers));
        let (shift, what) = match convention {
            AuxLayerConvention::Boundary => (0, "boundaries of layers"),
            _ => (1, "layers"),
        };
        match ids.iter().find(|&&id| id > layers - shift) {
            Some(id) => Err(config.needs(
                Setting::AuxLayerConvention,
                format!(
                    "{LAYER_IDS} must name {what} of the target, which has {layers}; found {id} \
                     (they may be numbered otherwise)"
                ),
            )),
            None => Ok(ids.iter().map(|id| id + shift).collect()),
        }
    }
}

fn ids(settings: &Settings<'_>, field: &str) -> Result<Vec<usize>> {
    let Some(value) = settings.get(field) else { return Ok(Vec::new()) };
    let wrong = |problem: &str| {
        Err(settings.wrong(field, format!("must {problem}, found {}", shown(value))))
    };
    let ids: Option<Vec<usize>> = value.as_array().and_then(|list| {
        list.iter().map(|v| v.as_u64().and_then(|n| usize::try_from(n).ok())).collect()
    });
    match ids {
        Some(ids) if ids.is_empty() => wrong("name at least one layer"),
        Some(ids) if !ids.is_sorted_by(|a, b| a < b) => wrong("be ascending"),
        Some(ids) => Ok(ids),
        None => wrong("be a list of layers"),
    }
}
