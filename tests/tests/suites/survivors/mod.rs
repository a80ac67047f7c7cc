//! Rings that lose ranks at any step, and are finished by those who are left: proved, and held to the oracle.
//!
//! Nothing here has a network. `cuts.rs` proves plans at times that are drawn, `runs.rs` runs them on the CPU backend from what is
//! really left on each rank; both put faults in, each of which must be found.

mod cuts;
mod drawn;
mod runs;
