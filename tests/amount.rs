//! How much the tests run. Usually a sample with fixed seeds in which every claim occurs; with
//! `KYKLOS_TESTS=all` everything. Nothing else reads that variable.

/// `sample`, or `all` where everything is to be run.
pub(crate) fn amount<T>(sample: T, all: T) -> T {
    match std::env::var("KYKLOS_TESTS").as_deref() {
        Err(std::env::VarError::NotPresent) => sample,
        Ok("all") => all,
        other => panic!("KYKLOS_TESTS is `all` or not set, and not {other:?}"),
    }
}
