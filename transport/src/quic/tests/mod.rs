//! Groups in one process: who is admitted, whose identity is refused, and how lanes share messages.

mod admission;
mod lanes;
mod trust;
