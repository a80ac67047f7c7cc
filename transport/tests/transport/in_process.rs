//! The in-process transport keeps the contract.

use kyklos_transport::in_process_group;

conformance_tests!(in_process_group);
