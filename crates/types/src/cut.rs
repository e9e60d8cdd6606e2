//! The cut: how many layers of a component each of its stages holds.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The most stages that a cut can name.
const STAGES_MAX: usize = 63;

/// Layers of each stage of a component, by stage: where they are not as even as they can be.
///
/// Files hold a list, for example `[5, 6, 6, 3]`.
///
/// # Examples
/// ```
/// use dflop_types::LayerCut;
/// let cut = LayerCut::new(&[5, 6, 6, 3])?;
/// assert_eq!((cut.num_stages(), cut.num_layers()), (4, 20));
/// assert!(LayerCut::new(&[5, 0]).is_err());
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "Vec<u32>", into = "Vec<u32>")]
pub struct LayerCut {
    // In the place itself, so that a layout can be copied; what is past the last stage is 0.
    layers: [u8; STAGES_MAX],
}

impl LayerCut {
    /// The cut of these layers by stage.
    ///
    /// # Errors
    /// What is wrong: no stages or more than 63, or a stage without layers or with more than 255.
    pub fn new(layers: &[u32]) -> Result<Self, String> {
        if layers.is_empty() || layers.len() > STAGES_MAX {
            return Err(format!("{} stages, must be 1 to {STAGES_MAX}", layers.len()));
        }
        let mut cut = Self { layers: [0; STAGES_MAX] };
        for (place, &number) in cut.layers.iter_mut().zip(layers) {
            *place = match u8::try_from(number) {
                Ok(number) if number > 0 => number,
                _ => return Err(format!("a stage of {number} layers, must be 1 to {}", u8::MAX)),
            };
        }
        Ok(cut)
    }

    /// Layers by stage.
    pub fn layers(&self) -> impl Iterator<Item = u32> + '_ {
        self.layers.iter().take_while(|&&number| number > 0).map(|&number| u32::from(number))
    }

    /// Stages that it is for.
    pub fn num_stages(&self) -> u32 {
        self.layers().count() as u32
    }

    /// Layers of all stages together.
    pub fn num_layers(&self) -> u32 {
        self.layers().sum()
    }
}

impl From<LayerCut> for Vec<u32> {
    fn from(cut: LayerCut) -> Self {
        cut.layers().collect()
    }
}

impl TryFrom<Vec<u32>> for LayerCut {
    type Error = String;

    fn try_from(layers: Vec<u32>) -> Result<Self, String> {
        Self::new(&layers)
    }
}

impl fmt::Display for LayerCut {
    /// As in `5+6+6+3`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.layers().map(|number| number.to_string()).collect();
        f.write_str(&numbers.join("+"))
    }
}

impl fmt::Debug for LayerCut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LayerCut({self})")
    }
}

/// Layers of each stage when `num_layers` are cut into `num_stages` runs, the longer runs first.
///
/// The last stage also holds the head, so where the cut is uneven it gets the shorter run.
///
/// # Panics
/// If `num_stages` is 0.
pub fn cut_layers(num_layers: u32, num_stages: u32) -> Vec<u32> {
    assert!(num_stages > 0, "a component has at least one stage");
    (0..num_stages)
        .map(|stage| num_layers / num_stages + u32::from(stage < num_layers % num_stages))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_layer_is_in_one_stage(layers in 1u32..100, stages in 1u32..12) {
            let cut = cut_layers(layers, stages);
            prop_assert_eq!(cut.iter().sum::<u32>(), layers);
            prop_assert!(cut.iter().max().unwrap() - cut.iter().min().unwrap() <= 1);
        }

        #[test]
        fn a_cut_is_written_as_a_list_and_read_back(layers in prop::collection::vec(1u32..256, 1..64)) {
            let cut = LayerCut::new(&layers).unwrap();
            prop_assert_eq!(serde_json::to_value(cut).unwrap(), serde_json::json!(&layers));
            prop_assert_eq!(serde_json::from_value::<LayerCut>(serde_json::json!(&layers)).unwrap(), cut);
            prop_assert_eq!(cut.num_layers(), layers.iter().sum::<u32>());
            prop_assert_eq!(cut.num_stages() as usize, layers.len());
        }
    }

    #[test]
    fn what_is_no_cut_says_its_rule() {
        let error = |layers: &[u32]| LayerCut::new(layers).unwrap_err();
        assert_eq!(error(&[]), "0 stages, must be 1 to 63");
        assert_eq!(error(&[1; 64]), "64 stages, must be 1 to 63");
        assert_eq!(error(&[3, 0]), "a stage of 0 layers, must be 1 to 255");
        assert_eq!(error(&[300]), "a stage of 300 layers, must be 1 to 255");
        assert_eq!(LayerCut::new(&[5, 3]).unwrap().to_string(), "5+3");
    }
}
