//! Values of options, and the options that several commands share.

pub(crate) mod headings;
mod problem;
mod refusal;
mod tabs;
mod values;

pub(crate) use problem::ProblemArgs;
pub(crate) use refusal::one_line;
pub(crate) use tabs::TabArgs;
pub(crate) use values::{
    ByteSize, CollectiveName, KernelName, List, ListItem, OnLoss, OrAuto, ProgressKind, RANK, Shape,
    SplitName, StrategyName, TransportName,
};
