//! Rings that lose ranks at any step and are finished by the survivors: proved, and compared with the oracle.
//!
//! No network is involved. `cuts.rs` proves repairs at random times, `runs.rs` runs them on the CPU backend from what
//! interrupted ranks hold; both plant faults, each of which must be found.

mod cuts;
mod drawn;
mod runs;
