//! Control: the suite fails on a device that computes nothing, and names the claims that do not
//! hold.
//!
//! The suite ends its process, so this program runs itself again, as the test of a backend.

use std::process::Command;

use kyklos_backend_suite::DoNothing;
use libtest_mimic::{Arguments, Trial};

/// The environment variable of the process that is the test of a backend.
const IS_BACKEND_TEST: &str = "KYKLOS_CONTROL";

/// What a device does that computes nothing: it cancels, gives the same zeros every time, and lets
/// nothing through.
const HOLD: [&str; 6] = [
    "gives the same bytes every time",
    "gives the same gradients every time",
    // Nothing moves, and the zeros on the device equal the zeros through the host.
    "keeps forty layers on the device",
    "lets no hidden value reach a row",
    "stops a backward pass when it is cancelled",
    "stops when it is cancelled",
];

const FAIL: [&str; 27] = [
    "adds exactly the given rows, and clears",
    "agrees with the oracle on every case in bf16",
    "agrees with the oracle on every case in f16",
    "agrees with the oracle on every case in f32",
    "agrees with the oracle on gradients in bf16, or refuses them",
    "agrees with the oracle on gradients in f16, or refuses them",
    "agrees with the oracle on gradients in f32, or refuses them",
    "agrees with the oracle on logits of any size",
    "carries a running state over a ring",
    "computes results with the last block as it does afterwards",
    "converts as the definition says",
    "copies exactly the given rows",
    "downloads the bytes that were uploaded",
    "encodes int8 as the definition says",
    "gives a log-sum-exp as two numbers",
    "gives the mean of the values where all logits are one huge number",
    "keeps a cache on the device",
    "leaves the state of rows that see nothing alone",
    "merges two states as if it had attended to both",
    "refuses more memory than there is",
    "reports numbers beyond f16",
    "shows a NaN in a bias to the row that sees it",
    "shows a NaN in a key to the rows that see it",
    "sums in a fixed order to the same bytes on any mesh, or refuses to",
    "swaps heads for tokens with an all-to-all",
    "takes a scale of any size",
    "takes denormal elements",
];

fn main() {
    if std::env::var_os(IS_BACKEND_TEST).is_some() {
        kyklos_backend_suite::run("nothing", DoNothing::open);
    }
    let trial = Trial::test("the_suite_fails_on_a_device_that_computes_nothing", || {
        let output = Command::new(std::env::current_exe()?).env(IS_BACKEND_TEST, "1").output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        let claims = |ending: &str| {
            let lines =
                said.lines().filter_map(|line| line.strip_prefix("test nothing: ")?.split_once(" ... "));
            let mut claims: Vec<_> = lines
                .filter(|(_, end)| *end == ending)
                .map(|(claim, _)| claim.trim_end().to_owned())
                .collect();
            claims.sort();
            claims
        };
        assert_eq!(claims("FAILED"), FAIL, "{said}");
        assert_eq!(claims("ok"), HOLD, "{said}");
        assert_eq!(output.status.code(), Some(101), "{said}");
        Ok(())
    });
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit()
}
