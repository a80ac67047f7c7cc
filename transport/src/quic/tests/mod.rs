//! Groups in one process: which ranks are admitted, which identities are refused, and how lanes share messages.

mod admission;
mod lanes;
mod renewal;
mod trust;
