//! Rings that lose ranks at any step. The survivors finish them. The repair is proved, and the result is compared with
//! the oracle.
//!
//! No network is involved. `cuts.rs` proves repairs at random times. `runs.rs` runs repairs on the CPU backend, from
//! the state of interrupted ranks. Both plant faults. Every planted fault must be found.

mod cuts;
mod drawn;
mod runs;
