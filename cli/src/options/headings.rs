//! Headings of the options in `--help` and the manual pages, the same for all commands.

pub(crate) const INPUT: &str = "Input";
pub(crate) const PARALLELISM: &str = "Parallelism";
pub(crate) const MASK: &str = "Mask and scores";
pub(crate) const DEVICE: &str = "Device";
pub(crate) const TABS: &str = "Browser tabs (--device tab)";
pub(crate) const NETWORK: &str = "Network between ranks";
pub(crate) const GROUP: &str = "One process of several";
pub(crate) const OUTPUT: &str = "Output";
pub(crate) const RECOVERY: &str = "Recovery";
pub(crate) const DIAGNOSIS: &str = "Diagnosis";
pub(crate) const MEASUREMENT: &str = "Measurement";
