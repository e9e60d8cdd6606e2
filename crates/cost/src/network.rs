//! Transfers between ranks: latency plus bytes over bandwidth.

use crate::cost::CostModel;
use crate::grid::scale;

impl CostModel {
    /// Time of one message of `tokens` features or hidden states, in nanoseconds.
    ///
    /// ```text
    /// t = latency + tokens * hidden_bytes / bandwidth
    /// ```
    ///
    /// 0 where the network was not measured ([`CostModel::is_network_measured`]), and where nothing is sent.
    ///
    /// *Not modelled*: contention between messages, other links inside a node than between nodes.
    pub fn transfer_ns(&self, tokens: u64) -> u64 {
        let Some(link) = self.network.point_to_point() else { return 0 };
        if tokens == 0 {
            return 0;
        }
        let bytes = tokens.saturating_mul(self.hidden_bytes);
        link.latency_ns.saturating_add(scale(bytes, 1_000_000_000, link.bandwidth_bytes_per_s))
    }

    /// Whether transfers were measured; if not they are taken as free, which whoever shows a prediction must
    /// say.
    pub fn is_network_measured(&self) -> bool {
        self.network.point_to_point().is_some()
    }
}
