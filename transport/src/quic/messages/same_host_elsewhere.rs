//! Systems on which no memory is shared: every message goes over QUIC.

use crate::quic::control::core::Core;
use crate::rank::Rank;
use crate::wire::{Frame, MemoryOffer};

impl Core {
    /// There is nothing to offer.
    pub(crate) fn offer_memory(&self) {}

    /// The peer offers memory to this rank.
    pub(crate) fn offered_memory(&self, peer: Rank, _: MemoryOffer) {
        if let Some(link) = self.link(peer) {
            link.say(Frame::NoSharedMemory { text: "its system shares no memory".into() });
        }
    }

    /// Nothing was offered.
    pub(crate) fn declined_memory(&self, _: Rank, _: &str) {}
}
