//! The fullest moment of a step on one rank: its action list walked once, with what each action takes and gives
//! back. Microbatches differ in size, so the moment is searched for and not counted.

use crate::memory::bytes::{MemoryError, Moment};
use crate::memory::footprint::Bytes;
use crate::memory::holding::Buffers;
use dflop_types::{Action, ActionKind, SplitBytes};

/// The first and the last piece of an LLM backbone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Embedding,
    Head,
}

/// One module (or the run of equal layers) that a microbatch passes on a rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Bytes held from its forward to its backward.
    pub(crate) kept: u64,
    /// Bytes needed beyond that while it runs.
    pub(crate) workspace: u64,
    /// Bytes of its result; the gradient of the result takes as many. The result of the last piece is the rank's
    /// border.
    pub(crate) result: u64,
    /// Bytes of the gradient of its result, where they are known to be fewer.
    pub(crate) gradient: u64,
    /// Bytes that are there while it runs back: gradients of pieces behind it that wait (the head's, where it shares the matrix
    /// of the embedding; autograd adds the two before it hands them over), and what it gathers.
    pub(crate) waiting: u64,
    /// Bytes that are there behind its backward, when what it kept and its workspace are free.
    pub(crate) summing: u64,
    /// Which end of the backbone it is; none: a layer, or of an encoder. What the head keeps is named as logits.
    pub(crate) end: Option<End>,
    /// Equal layers.
    pub(crate) count: u64,
    /// The part of `kept` that belongs to each layer but the first.
    pub(crate) kept_of_one: u64,
    /// Of one layer.
    pub(crate) split: SplitBytes,
}

impl Piece {
    /// `count` equal layers, each with a result of this many bytes.
    pub(crate) fn new(of_one: &Bytes, count: u64, result: u64) -> Self {
        Self {
            kept: of_one.kept.saturating_mul(count),
            workspace: of_one.workspace,
            result,
            gradient: result,
            waiting: 0,
            summing: 0,
            end: None,
            count,
            kept_of_one: of_one.kept,
            split: of_one.split(result),
        }
    }

    /// What waits for W, of all layers together.
    const fn queued(&self) -> u64 {
        self.split.queued_bytes.saturating_mul(self.count)
    }

    /// `bytes` of `kept`, by name.
    const fn named(&self, bytes: u64) -> Load {
        if matches!(self.end, Some(End::Head)) {
            Load { logits: bytes, ..Load::NONE }
        } else {
            Load { activations: bytes, ..Load::NONE }
        }
    }
}

/// The memory that one microbatch needs on a rank; nothing where the rank has none of its samples.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MicrobatchBytes {
    /// In the order of the forward.
    pub(crate) pieces: Vec<Piece>,
    /// Bytes that come in at the forward; their gradient goes out at the backward.
    pub(crate) incoming: u64,
    /// Bytes that go out at the forward; their gradient comes in at the backward.
    pub(crate) outgoing: u64,
}

impl MicrobatchBytes {
    /// Adds what embedding and head gather beyond what is `held` all the time.
    pub(crate) fn gather(&mut self, gathered: Gathered, held: u64) {
        for piece in &mut self.pieces {
            let of_end = match piece.end {
                None => continue,
                Some(End::Embedding) => gathered.embedding,
                Some(End::Head) => gathered.head,
            };
            piece.waiting = piece.waiting.saturating_add(of_end.running.saturating_sub(held));
            piece.summing = of_end.summing.saturating_sub(held);
        }
    }

    fn kept(&self, pieces: &[Piece]) -> Load {
        let mut load = Load::default();
        for piece in pieces {
            load = load.plus(piece.named(piece.kept));
        }
        debug_assert!(pieces.len() <= self.pieces.len(), "a run of this microbatch's own");
        load
    }
}

/// Bytes of parameters and gradients that are whole on a rank while something runs, where parameters are cut (zero 3).
/// FSDP2 gathers the next unit while one runs, and frees the gradient of a unit when the next one's begins its sum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Gathered {
    /// While layers run: two of them, their gradients, and what is in no unit of its own (norms, projectors, a matrix that
    /// embedding and head share). Behind the last layer this includes the head's gradient on its way.
    pub(crate) layers: u64,
    pub(crate) embedding: GatheredEnd,
    pub(crate) head: GatheredEnd,
}

/// What of an end is whole, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct GatheredEnd {
    /// While it runs: its parameters and the layer beside it. Its gradient is among what was measured as its workspace.
    pub(crate) running: u64,
    /// Behind its backward, when it needs no workspace any more: its gradient, and the copy that is summed.
    pub(crate) summing: u64,
}

/// Bytes at one moment, without what the rank holds independently of the samples.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) activations: u64,
    pub(crate) logits: u64,
    pub(crate) workspace: u64,
    pub(crate) boundary: u64,
    pub(crate) queue: u64,
}

impl Load {
    const NONE: Self = Self { activations: 0, logits: 0, workspace: 0, boundary: 0, queue: 0 };

    pub(crate) const fn total(&self) -> u64 {
        self.activations
            .saturating_add(self.logits)
            .saturating_add(self.workspace)
            .saturating_add(self.boundary)
            .saturating_add(self.queue)
    }

    fn plus(self, other: Self) -> Self {
        Self {
            activations: self.activations.saturating_add(other.activations),
            logits: self.logits.saturating_add(other.logits),
            workspace: self.workspace.saturating_add(other.workspace),
            boundary: self.boundary.saturating_add(other.boundary),
            queue: self.queue.saturating_add(other.queue),
        }
    }

    fn minus(self, other: Self) -> Self {
        Self {
            activations: self.activations.saturating_sub(other.activations),
            logits: self.logits.saturating_sub(other.logits),
            workspace: self.workspace.saturating_sub(other.workspace),
            boundary: self.boundary.saturating_sub(other.boundary),
            queue: self.queue.saturating_sub(other.queue),
        }
    }
}

/// Where a microbatch stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Waiting,
    InFlight,
    WeightsLeft,
    Done,
}

struct Walk<'a> {
    microbatches: &'a [MicrobatchBytes],
    buffers: Buffers,
    states: Vec<State>,
    held: Load,
    /// Part of `held.boundary`: messages that were sent and are not freed yet.
    sent: u64,
    peak: (Load, Moment),
}

/// The fullest moment of `actions` and what is held then; the first of equals. `openings`: as in [`crate::RankSteps`].
///
/// *Complexity*: O(a) for a actions.
pub(crate) fn fullest(
    microbatches: &[MicrobatchBytes],
    actions: &[Action],
    openings: &[u32],
    buffers: Buffers,
) -> Result<(Load, Moment), MemoryError> {
    let mut walk = Walk {
        microbatches,
        buffers,
        states: vec![State::Waiting; microbatches.len()],
        held: Load::default(),
        sent: 0,
        peak: (Load::default(), Moment::Optimizer),
    };
    // Messages whose receives open just before each action.
    let mut opened = vec![0u64; actions.len()];
    for (position, action) in actions.iter().enumerate() {
        let at = openings.get(position).map_or(position, |&num_before| position.min(num_before as usize));
        opened[at] = opened[at].saturating_add(walk.message(*action)?);
    }
    let mut posted = 0u64;
    for (&action, opened) in actions.iter().zip(opened) {
        posted = posted.saturating_add(opened);
        walk.run(action, posted)?;
        posted = posted.saturating_sub(walk.message(action)?);
    }
    Ok(walk.peak)
}

impl Walk<'_> {
    /// Bytes of the message that `action` waits for.
    fn message(&self, action: Action) -> Result<u64, MemoryError> {
        let microbatch = self
            .microbatches
            .get(action.microbatch as usize)
            .ok_or(MemoryError::UnknownMicrobatch { action, num_microbatches: self.microbatches.len() })?;
        Ok(match action.kind {
            ActionKind::F => microbatch.incoming,
            ActionKind::B | ActionKind::I => microbatch.outgoing,
            ActionKind::W => 0,
        })
    }

    fn run(&mut self, action: Action, posted: u64) -> Result<(), MemoryError> {
        let index = action.microbatch as usize;
        let (from, to) = match action.kind {
            ActionKind::F => (State::Waiting, State::InFlight),
            ActionKind::B => (State::InFlight, State::Done),
            ActionKind::I => (State::InFlight, State::WeightsLeft),
            ActionKind::W => (State::WeightsLeft, State::Done),
        };
        if self.states[index] != from {
            return Err(MemoryError::OutOfTurn { action });
        }
        self.states[index] = to;
        let microbatches = self.microbatches;
        let microbatch = &microbatches[index];
        match action.kind {
            ActionKind::F => self.forward(action, microbatch, posted),
            ActionKind::B => self.backward(action, microbatch, posted),
            ActionKind::I => self.inputs(action, microbatch, posted),
            ActionKind::W => self.weights(action, microbatch, posted),
        }
        Ok(())
    }

    /// Compares one moment with the fullest so far: `more` bytes beside what is held and the open messages.
    fn see(&mut self, action: Action, posted: u64, more: Load) {
        let mut load = self.held.plus(more);
        load.boundary = load.boundary.saturating_add(posted);
        if load.total() > self.peak.0.total() {
            self.peak = (load, Moment::Action(action));
        }
    }

    const fn copied(&self, bytes: u64) -> u64 {
        if self.buffers.copies_rows { bytes } else { 0 }
    }

    fn forward(&mut self, action: Action, microbatch: &MicrobatchBytes, posted: u64) {
        let pieces = &microbatch.pieces;
        for (index, piece) in pieces.iter().enumerate() {
            let result = if index + 1 == pieces.len() { microbatch.outgoing } else { piece.result };
            let more = Load {
                workspace: piece.workspace,
                boundary: self.copied(microbatch.incoming).saturating_add(result),
                ..microbatch.kept(&pieces[..=index])
            };
            self.see(action, posted, more);
        }
        let borders = microbatch.incoming.saturating_add(microbatch.outgoing);
        self.held = self.held.plus(Load { boundary: borders, ..microbatch.kept(pieces) });
        // Where rows are copied a message is more than a name of what is held anyway.
        self.send(self.copied(microbatch.outgoing));
    }

    fn backward(&mut self, action: Action, microbatch: &MicrobatchBytes, posted: u64) {
        let pieces = &microbatch.pieces;
        for (index, piece) in pieces.iter().enumerate().rev() {
            // What the pieces behind it kept is free by now.
            self.held = self.held.minus(microbatch.kept(pieces.get(index + 1..index + 2).unwrap_or(&[])));
            let gradient = if index + 1 == pieces.len() { 0 } else { piece.result };
            let boundary = self.copied(microbatch.outgoing).saturating_add(gradient);
            let workspace = piece.workspace.saturating_add(piece.waiting);
            self.see(action, posted, Load { workspace, boundary, ..Load::default() });
            if piece.summing > 0 {
                let held = self.held;
                self.held = held.minus(microbatch.kept(&pieces[index..=index]));
                self.see(action, posted, Load { workspace: piece.summing, boundary, ..Load::default() });
                self.held = held;
            }
        }
        self.held = self.held.minus(microbatch.kept(&pieces[..pieces.len().min(1)]));
        self.release_outgoing(microbatch);
        self.held.boundary = self.held.boundary.saturating_sub(microbatch.incoming);
        self.send(microbatch.incoming);
    }

    /// Gradients of the inputs alone: layer by layer what was kept becomes what waits for W. Over equal layers that
    /// rises or falls evenly, so the fullest of them is the last or the first.
    fn inputs(&mut self, action: Action, microbatch: &MicrobatchBytes, posted: u64) {
        let pieces = &microbatch.pieces;
        for (index, piece) in pieces.iter().enumerate().rev() {
            let workspace = piece.split.input_workspace_bytes;
            let mut boundary = self.copied(microbatch.outgoing);
            if index + 1 < pieces.len() {
                boundary = boundary.saturating_add(piece.gradient);
            }
            self.see(action, posted, Load { workspace, boundary, ..Load::default() });
            let (behind, mut kept) = (piece.count.saturating_sub(1), piece.kept);
            if behind > 0 {
                let freed = piece.kept_of_one.saturating_mul(behind);
                self.queue(piece, freed, behind);
                kept = kept.saturating_sub(freed);
                let boundary = self.copied(microbatch.outgoing).saturating_add(piece.gradient);
                self.see(action, posted, Load { workspace, boundary, ..Load::default() });
            }
            self.queue(piece, kept, piece.count - behind);
        }
        self.release_outgoing(microbatch);
        self.held.boundary = self.held.boundary.saturating_sub(microbatch.incoming);
        self.send(microbatch.incoming);
    }

    /// I of `count` layers of `piece` frees `kept` and queues what their weights need.
    fn queue(&mut self, piece: &Piece, kept: u64, count: u64) {
        self.held = self.held.minus(piece.named(kept));
        let queued = piece.split.queued_bytes.saturating_mul(count);
        self.held.queue = self.held.queue.saturating_add(queued);
    }

    /// Gradients of the weights, in the order of the backward.
    fn weights(&mut self, action: Action, microbatch: &MicrobatchBytes, posted: u64) {
        for piece in microbatch.pieces.iter().rev() {
            let workspace = piece.split.weight_workspace_bytes;
            self.see(action, posted, Load { workspace, ..Load::default() });
            self.held.queue = self.held.queue.saturating_sub(piece.queued());
        }
    }

    /// The result of a microbatch is free after its backward, unless it is itself the message that is held.
    fn release_outgoing(&mut self, microbatch: &MicrobatchBytes) {
        self.held.boundary = self.held.boundary.saturating_sub(microbatch.outgoing);
        if self.buffers.keeps_sent && !self.buffers.copies_rows {
            self.send(microbatch.outgoing);
        }
    }

    fn send(&mut self, bytes: u64) {
        if bytes == 0 {
            return;
        }
        if !self.buffers.keeps_sent {
            self.held.boundary = self.held.boundary.saturating_sub(self.sent);
            self.sent = 0;
        }
        self.sent = self.sent.saturating_add(bytes);
        self.held.boundary = self.held.boundary.saturating_add(bytes);
    }
}
