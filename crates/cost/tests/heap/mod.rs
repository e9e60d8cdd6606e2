//! A plain simulation of a step on one rank, layer by layer: named buffers are allocated and freed. With the bytes a
//! token that the tests' profile has.

use dflop_cost::{RankMicrobatch, RankRole};
use dflop_types::{Action, ActionKind};
use std::collections::BTreeMap;

pub(crate) const HIDDEN: u64 = 64;
/// Id, position, target and mask of a token.
pub(crate) const INPUTS: u64 = 25;

/// Bytes a token of one module.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    /// By the linear part and by attention.
    pub(crate) kept: [u64; 2],
    /// Of the pack, and of attention alone.
    pub(crate) workspace: [u64; 2],
    /// Waits from I to W.
    pub(crate) queued: u64,
    pub(crate) input_workspace: u64,
    pub(crate) weight_workspace: u64,
    pub(crate) num_parameters: u64,
}

const fn row(name: &'static str, kept: [u64; 2], workspace: [u64; 2], split: [u64; 3], num: u64) -> Row {
    let [queued, input_workspace, weight_workspace] = split;
    Row { name, kept, workspace, queued, input_workspace, weight_workspace, num_parameters: num }
}

/// Of the LLM layer less waits than was kept, of the projector and the embedding more.
pub(crate) const MODULES: [Row; 6] = [
    row("encoder_embedding", [11, 0], [5, 0], [3, 6, 2], 700),
    row("encoder_layer", [230, 40], [90, 130], [265, 150, 20], 5_000),
    row("projector", [70, 0], [60, 0], [95, 90, 10], 900),
    row("llm_embedding", [9, 0], [2_000, 0], [72, 2_050, 1_900], 30_000),
    row("llm_layer", [900, 120], [310, 30], [700, 500, 40], 8_000),
    row("llm_head", [4_000, 0], [5_000, 0], [4_300, 5_100, 100], 31_000),
];

/// The row of a module.
pub(crate) fn of(name: &str) -> Row {
    *MODULES.iter().find(|row| row.name == name).expect("a module")
}

/// Live buffers by name, and the most there ever was.
#[derive(Default)]
struct Heap {
    live: BTreeMap<String, u64>,
    most: u64,
}

impl Heap {
    fn alloc(&mut self, name: impl Into<String>, bytes: u64) {
        assert!(self.live.insert(name.into(), bytes).is_none());
        self.most = self.live.values().sum::<u64>().max(self.most);
    }

    fn free(&mut self, name: &str) {
        assert!(self.live.remove(name).is_some(), "{name}");
    }

    /// There for a moment.
    fn touch(&mut self, bytes: u64) {
        self.alloc("workspace", bytes);
        self.free("workspace");
    }
}

/// One layer with one microbatch.
struct Layer {
    name: String,
    kept: u64,
    workspace: u64,
    /// Goes to the next layer.
    result: u64,
    /// Comes back from it in I.
    gradient: u64,
    queued: u64,
    input_workspace: u64,
    weight_workspace: u64,
}

/// A rank and its microbatches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rank<'a> {
    pub(crate) role: RankRole,
    pub(crate) microbatches: &'a [RankMicrobatch],
    /// Rows are copied into messages and out of them.
    pub(crate) copies: bool,
    /// What was sent stays to the end of the step.
    pub(crate) keeps: bool,
    /// Whether the profile has the bytes of I and W.
    pub(crate) is_split_counted: bool,
}

impl Rank<'_> {
    /// What a module asks for `total` tokens. `next`: bytes of its result and of the gradient of that, as the next one
    /// knows them; `own`: of its result, as it is assumed.
    fn layer(&self, row: Row, name: String, total: u64, next: [u64; 2], own: u64) -> Layer {
        let [result, gradient] = next;
        let kept = (row.kept[0] + row.kept[1]) * total;
        let workspace = (row.workspace[0] * total).max(row.workspace[1] * total);
        // Of attention that needs more than the pack did, I needs as much more.
        let more = workspace - row.workspace[0] * total;
        let counted = [row.queued * total, row.input_workspace * total + more, row.weight_workspace * total];
        // All inputs were kept; all outputs too, but for the result, which is the next one's input. No tokens, no result.
        let own = if total == 0 { 0 } else { own };
        let assumed = [kept + kept + own, workspace + kept + own, workspace];
        let [queued, input_workspace, weight_workspace] =
            if self.is_split_counted { counted } else { assumed };
        Layer { name, kept, workspace, result, gradient, queued, input_workspace, weight_workspace }
    }

    /// The layers that microbatch `j` passes.
    fn layers(&self, j: usize) -> Vec<Layer> {
        let shape = &self.microbatches[j].shape;
        let (encoder, llm) = (shape.encoder_tokens(), shape.total_llm_tokens());
        let mut layers = Vec::new();
        let mut add = |name: &str, count: u32, total: u64, next: [u64; 2], own: u64| {
            for index in 0..count {
                layers.push(self.layer(of(name), format!("{name} {index} of {j}"), total, next, own));
            }
        };
        match self.role {
            RankRole::Encoder if encoder > 0 => {
                // Modules keep their inputs, and make gradients of them as they run back: the width of the encoder is
                // not in the profile.
                add("encoder_embedding", 1, encoder, [270 * encoder, 130 * encoder], 130 * encoder);
                add("encoder_layer", 3, encoder, [70 * encoder, 60 * encoder], 60 * encoder);
                add("projector", 1, encoder, [0, 0], self.borders(j).1);
            }
            RankRole::Stage(stage) if llm > 0 => {
                let hidden = HIDDEN * llm;
                add("llm_embedding", u32::from(stage.is_first), llm, [hidden; 2], hidden);
                add("llm_layer", stage.num_layers, llm, [hidden; 2], hidden);
                add("llm_head", u32::from(stage.is_last), shape.label_tokens, [0, 0], hidden);
            }
            _ => {}
        }
        if let (RankRole::Stage(stage), Some(first)) = (self.role, layers.first_mut()) {
            // The message is the first layer's own input; ids and the like come beside.
            first.kept += INPUTS * llm;
            first.kept -= if stage.is_first { 0 } else { self.borders(j).0 };
        }
        layers
    }

    fn borders(&self, j: usize) -> (u64, u64) {
        let microbatch = &self.microbatches[j];
        let hidden = HIDDEN * microbatch.shape.total_llm_tokens();
        match self.role {
            RankRole::Encoder => (0, HIDDEN * microbatch.feature_tokens),
            RankRole::EncoderStage(_) => unreachable!("stages of the encoder have tests of their own"),
            RankRole::Stage(stage) => (
                if stage.is_first { HIDDEN * microbatch.feature_tokens } else { hidden },
                if stage.is_last { 0 } else { hidden },
            ),
        }
    }

    /// The most bytes that `actions` ever hold, without what the rank holds whatever the samples.
    pub(crate) fn most(self, actions: &[Action], openings: &[u32]) -> u64 {
        let mut run = Run { rank: self, heap: Heap::default(), sent: vec![], num_sent: 0 };
        for (position, action) in actions.iter().enumerate() {
            for (opened, _) in actions.iter().zip(openings).filter(|(_, at)| **at as usize == position) {
                run.post(*opened);
            }
            run.act(*action);
        }
        run.heap.most
    }
}

struct Run<'a> {
    rank: Rank<'a>,
    heap: Heap,
    sent: Vec<String>,
    num_sent: usize,
}

impl Run<'_> {
    fn post(&mut self, action: Action) {
        let (incoming, outgoing) = self.rank.borders(action.microbatch as usize);
        let bytes = match action.kind {
            ActionKind::F => incoming,
            ActionKind::B | ActionKind::I => outgoing,
            ActionKind::W => 0,
        };
        self.heap.alloc(format!("message of {action}"), bytes);
    }

    fn send(&mut self, bytes: u64) {
        if bytes == 0 {
            return;
        }
        if !self.rank.keeps {
            for name in std::mem::take(&mut self.sent) {
                self.heap.free(&name);
            }
        }
        self.num_sent += 1;
        let name = format!("sent {}", self.num_sent);
        self.heap.alloc(name.clone(), bytes);
        self.sent.push(name);
    }

    fn act(&mut self, action: Action) {
        let j = action.microbatch as usize;
        let layers = self.rank.layers(j);
        match action.kind {
            ActionKind::F => self.forward(j, &layers),
            ActionKind::B => self.backward(j, &layers, false),
            ActionKind::I => self.backward(j, &layers, true),
            ActionKind::W => self.weights(&layers),
        }
        self.heap.free(&format!("message of {action}"));
        let (incoming, outgoing) = self.rank.borders(j);
        match action.kind {
            ActionKind::F => {
                self.heap.alloc(format!("incoming {j}"), incoming);
                self.heap.alloc(format!("outgoing {j}"), outgoing);
                if self.rank.copies {
                    self.send(outgoing);
                }
            }
            ActionKind::B | ActionKind::I => {
                self.heap.free(&format!("incoming {j}"));
                self.heap.free(&format!("outgoing {j}"));
                if self.rank.keeps && !self.rank.copies {
                    self.send(outgoing);
                }
                self.send(incoming);
            }
            ActionKind::W => {}
        }
    }

    fn forward(&mut self, j: usize, layers: &[Layer]) {
        let (incoming, outgoing) = self.rank.borders(j);
        let heap = &mut self.heap;
        heap.alloc("joined", if self.rank.copies { incoming } else { 0 });
        for (index, layer) in layers.iter().enumerate() {
            heap.alloc(layer.name.clone(), layer.kept);
            heap.alloc("result", if index + 1 < layers.len() { layer.result } else { outgoing });
            heap.touch(layer.workspace);
            heap.free("result");
        }
        heap.free("joined");
    }

    /// From the last layer to the first: a gradient comes in, what was kept goes. In two parts something of it stays, and
    /// the gradients that the weights need with it.
    fn backward(&mut self, j: usize, layers: &[Layer], is_split: bool) {
        let (_, outgoing) = self.rank.borders(j);
        let heap = &mut self.heap;
        heap.alloc("joined", if self.rank.copies { outgoing } else { 0 });
        for (index, layer) in layers.iter().enumerate().rev() {
            // The first comes as a message.
            let gradient = if is_split { layer.gradient } else { layer.result };
            heap.alloc("gradient", if index + 1 < layers.len() { gradient } else { 0 });
            heap.touch(if is_split { layer.input_workspace } else { layer.workspace });
            heap.free("gradient");
            heap.free(&layer.name);
            if is_split {
                heap.alloc(format!("queue of {}", layer.name), layer.queued);
            }
        }
        heap.free("joined");
    }

    fn weights(&mut self, layers: &[Layer]) {
        for layer in layers.iter().rev() {
            self.heap.touch(layer.weight_workspace);
            self.heap.free(&format!("queue of {}", layer.name));
        }
    }
}
