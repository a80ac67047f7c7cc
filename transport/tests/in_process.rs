//! The in-process transport keeps the contract.

#[expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod conformance;

use kyklos_transport::in_process_group;

conformance_tests!(in_process_group);
