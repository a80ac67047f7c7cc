//! Values of options: what a text of the command line means.

mod values;

pub(crate) use values::{
    ByteSize, KernelName, List, ListItem, MaskArg, OrAuto, ProgressKind, Shape, SplitName, StrategyName,
    TokenRange, TransportName,
};
