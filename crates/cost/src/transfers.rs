//! Transfers by a cost model: the time of a message or a collective over the links of its profile.

use crate::cost::CostModel;
use crate::network::{Group, Route, Spread, Transfer};
use dflop_types::{Collective, Layout, LinkSpan};

impl CostModel {
    /// Time of one message or collective of `bytes` (the whole tensor that each rank has) over `num_ranks` ranks, with
    /// what stands behind it; 0 where nothing is sent, or fewer than two ranks take part.
    ///
    /// Exact at measured points, linear between them. Above them, and over a number of ranks that was not measured,
    /// latency plus bytes over bandwidth by the steps of a ring. Where the collective was not measured at all, a ring
    /// of point-to-point messages; where nothing was, 0. All but the first two are marked.
    ///
    /// *Complexity*: O(l + log n) for l links of n points.
    ///
    /// *Not modelled*: contention between messages.
    pub fn transfer(&self, collective: Collective, span: LinkSpan, num_ranks: u32, bytes: u64) -> Transfer {
        if num_ranks < 2 {
            return Transfer::default();
        }
        self.links.route(collective, span, num_ranks).transfer(bytes)
    }

    /// As [`CostModel::transfer`], over a group whose ranks share nodes as the size of a node has it.
    pub(crate) fn meeting(&self, collective: Collective, group: Group, bytes: u64) -> Transfer {
        self.meeting_at(collective, self.links.spread(group, self.ranks_per_node), group.num_ranks, bytes)
    }

    pub(crate) fn meeting_at(
        &self,
        collective: Collective,
        spread: Spread,
        num_ranks: u32,
        bytes: u64,
    ) -> Transfer {
        let route = self.route_at(collective, spread, num_ranks);
        route.map_or_else(Transfer::default, |route| route.transfer(bytes))
    }

    /// The way of a collective; `None` where fewer than two ranks take part.
    pub(crate) fn route_at(&self, collective: Collective, spread: Spread, num_ranks: u32) -> Option<Route> {
        (num_ranks >= 2).then(|| self.links.route_of(collective, spread, num_ranks))
    }

    /// [`Layout::ratio_across_nodes`] where the size of a node is known, else 0: all messages count as near.
    pub fn ratio_across_nodes(&self, layout: &Layout) -> f64 {
        self.ranks_per_node.map_or(0.0, |ranks| layout.ratio_across_nodes(ranks))
    }

    /// Time of a message of `tokens` features or hidden states from stage to stage, in nanoseconds: the mean over messages
    /// of which the part `across_nodes`, 0 to 1, goes to another node.
    ///
    /// 0 where the network was not measured ([`CostModel::is_network_measured`]), and where nothing is sent.
    ///
    /// *Not modelled*: contention between messages.
    pub fn transfer_ns(&self, tokens: u64, across_nodes: f64) -> u64 {
        let bytes = tokens.saturating_mul(self.hidden_bytes);
        let [near, far] = [0, 1].map(|at| self.message[at].transfer(bytes).ns as f64);
        (near + (far - near) * across_nodes).round() as u64
    }

    /// Time in which the ranks of a tensor group that hold a whole encoder each send their features to the others. The group has
    /// `num_ranks` ranks on one node, and the fullest of them has made `feature_tokens`. Gradients are not sent: every rank has
    /// those of all features.
    ///
    /// ```text
    /// (ranks - 1) * one message of the fullest rank's features
    /// ```
    pub fn group_exchange(&self, feature_tokens: u64, num_ranks: u32) -> Transfer {
        if feature_tokens == 0 || num_ranks < 2 {
            return Transfer::default();
        }
        let one = self.message[0].transfer(feature_tokens.saturating_mul(self.feature_bytes));
        Transfer { ns: one.ns.saturating_mul(u64::from(num_ranks) - 1), ..one }
    }

    /// Hidden states of a pack of `tokens` that a rank has between two layers of the LLM backbone, and sends to the next
    /// stage: the ranks of a tensor group share them.
    pub fn llm_rows(&self, tokens: u64) -> u64 {
        tokens.div_ceil(u64::from(self.settings.llm.tensor_parallel_degree.max(1)))
    }

    /// Hidden states of the LLM backbone that are as many bytes as those of `tokens` between two stages of the encoder:
    /// so many does [`CostModel::transfer_ns`] take for them.
    pub fn as_hidden_tokens(&self, encoder_tokens: u64) -> u64 {
        encoder_tokens.saturating_mul(self.encoder_hidden_bytes).div_ceil(self.hidden_bytes.max(1))
    }

    /// Hidden states of the LLM backbone that are as many bytes as these features: as many as features, or more where
    /// features are wider. So many does [`CostModel::transfer_ns`] take for them.
    pub fn features_as_hidden_tokens(&self, feature_tokens: u64) -> u64 {
        if self.feature_bytes == self.hidden_bytes {
            return feature_tokens;
        }
        feature_tokens.saturating_mul(self.feature_bytes).div_ceil(self.hidden_bytes.max(1))
    }

    /// Whether transfers were measured. If not, they count as free, and whoever shows a prediction must say so.
    pub const fn is_network_measured(&self) -> bool {
        self.message[0].is_known()
    }
}
