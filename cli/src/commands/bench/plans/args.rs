//! Options of `kyklos bench plans`.

use std::num::NonZeroU32;

use clap::Args;
use kyklos::Mask;

use crate::options::StrategyName;

#[derive(Clone, Debug, Args)]
pub(crate) struct PlansArgs {
    /// Numbers of ranks
    #[arg(
        long,
        value_name = "N,N,…",
        value_delimiter = ',',
        default_values = ["8", "16", "32", "64", "128", "256", "512", "1024"]
    )]
    pub(super) ranks: Vec<NonZeroU32>,
    /// Strategies
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', default_values = ["ring", "unified", "ulysses"])]
    pub(super) strategy: Vec<StrategyName>,
    /// Ulysses ranks of a mesh that has both
    #[arg(long, value_name = "U", default_value = "8")]
    pub(super) ulysses: NonZeroU32,
    /// Tokens of each rank
    #[arg(long, value_name = "N", default_value = "128")]
    pub(super) tokens: NonZeroU32,
    /// A mask as in `attend`
    #[arg(long, value_name = "MASK", default_value = "full")]
    pub(super) mask: Mask,
    /// Runs of each measurement, of which the fastest counts
    #[arg(long, value_name = "N", default_value = "3")]
    pub(super) repeat: NonZeroU32,
    /// Only votes of groups of at most so many threads of this process; 0: none
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub(super) most_voters: u32,
    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
}
