//! The in-process transport keeps the contract.

mod conformance;

use kyklos_transport::in_process_group;

conformance_tests!(in_process_group);
