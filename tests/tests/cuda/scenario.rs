//! Scenarios: the settings of the fake driver, the work on it, and the expected end of the process.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use kyklos::Dtype;
use kyklos_backend_suite::Prepared;
use kyklos_backend_suite::conformance::checks;
use kyklos_backend_suite::fixed_order::{UNEVEN, case, fixed};
use kyklos_cuda::CudaBackend;
use kyklos_oracle::oracle::{OracleMask, OracleTerm};
use libtest_mimic::{Failed, Trial};

/// The environment variable with the name of the scenario that a process runs.
pub(crate) const CHOSEN: &str = "KYKLOS_CUDA_SCENARIO";

/// Exit code of a process in which a check failed.
const FAILED_CHECK: i32 = 101;
/// Exit code of a process in which the fake driver found a misuse of the API.
const MISUSE: i32 = 86;
/// Exit code of a process that did not free all objects of the fake driver.
const LEAK: i32 = 87;
/// Exit code of a process in which the emulator found a fault of a kernel. A kernel that reads
/// while a copy writes can end so: its lanes may read different lengths of a loop.
const KERNEL_FAULT: i32 = 3;
/// Signal that ends a process after `LONGEST_S` seconds of processor time. A kernel that reads
/// before a copy writes may take what is in new memory for the length of a loop. Scenarios that
/// fail otherwise take a second or two.
const NO_END: i32 = 24;
const LONGEST_S: &str = "8";

#[derive(Clone)]
pub(crate) struct Scenario {
    pub(crate) name: String,
    /// The value of `KYKLOS_FAKE_CUDA`.
    pub(crate) fake: String,
    /// The value of `KYKLOS_FAKE_NCCL`.
    pub(crate) nccl: String,
    pub(crate) run: Arc<dyn Fn() + Send + Sync>,
    pub(crate) ends: Ends,
    /// Words that its output must contain, and words that it must not contain.
    pub(crate) says: &'static [&'static str],
    pub(crate) says_not: &'static [&'static str],
}

/// What takes longer than this hangs: more than a loaded machine needs, and less than the waits
/// that must not be reached, of a minute, two minutes and an hour.
pub(crate) const HANGS_AFTER: Duration = Duration::from_secs(50);

/// The expected end of a scenario's process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Ends {
    /// All checks pass, all objects are freed at exit, the API is not misused, and no copy is from
    /// or to pageable memory.
    Well,
    /// A check fails, or the fake driver finds a misuse, or the emulator a fault of a kernel: a bug
    /// was planted.
    Failing,
    /// The fake driver finds objects that are not freed at exit.
    LeavingSomething,
}

impl Scenario {
    pub(crate) fn new(name: &str, fake: &str, run: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            name: name.to_owned(),
            fake: fake.to_owned(),
            nccl: String::new(),
            run: Arc::new(run),
            ends: Ends::Well,
            says: &[],
            says_not: &[],
        }
    }

    pub(crate) fn trial(self) -> Trial {
        Trial::test(self.name.clone(), move || self.play(&[]).map(|_| ()).map_err(Failed::from))
    }

    /// Runs the scenario in a process of its own and returns its output.
    pub(crate) fn play(&self, environment: &[(&str, &str)]) -> Result<String, String> {
        // Not the cache of whoever runs the tests: it must never hold what the fake compiler makes.
        let cache = tempfile::tempdir().unwrap();
        let output = Command::new(std::env::current_exe().unwrap())
            .env(CHOSEN, &self.name)
            .env("KYKLOS_FAKE_CUDA", format!("report=1,{}", self.fake))
            .env("KYKLOS_FAKE_NCCL", &self.nccl)
            .env("LD_LIBRARY_PATH", kyklos_fake_cuda::library_path())
            .env("KYKLOS_CACHE_DIR", cache.path())
            .envs((self.ends == Ends::Failing).then_some(("KYKLOS_EMULATOR_CPU_SECONDS", LONGEST_S)))
            .envs(environment.iter().copied())
            .output()
            .unwrap();
        let said = words(&output);
        let right = match self.ends {
            Ends::Well => output.status.success() && said.contains(" 0 pageable copies"),
            Ends::Failing => {
                matches!(output.status.code(), Some(FAILED_CHECK | MISUSE | KERNEL_FAULT))
                    || output.status.signal() == Some(NO_END)
            }
            Ends::LeavingSomething => output.status.code() == Some(LEAK),
        };
        let right = right
            && self.says.iter().all(|words| said.contains(words))
            && !self.says_not.iter().any(|words| said.contains(words));
        if right {
            Ok(said)
        } else {
            Err(format!(
                "{:?}, {:?}, not {:?}, {}: {said}",
                self.ends, self.says, self.says_not, output.status
            ))
        }
    }
}

fn words(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat()
}

/// The conformance suite of all backends. Each claim has its own seed for the delays of streams.
/// All claims run on Hopper. The claims that use the most kernels also run on an older device.
/// Conversions run on both. The fixed order runs in bf16 only: in f32 it takes two minutes.
pub(crate) fn suite() -> Vec<Scenario> {
    let claims = checks::<CudaBackend>().into_iter().enumerate();
    let has = |claim: &str, words: &[&str]| words.iter().any(|word| claim.contains(word));
    let resident =
        || kyklos_backend_suite::resident::layers_stay_on_the_device(CudaBackend::new(0).unwrap(), 4);
    let cache = || kyklos_backend_suite::resident::caches_stay_on_the_device(CudaBackend::new(0).unwrap());
    let mut all = vec![
        Scenario::new("keeps four layers on the device", "seed=71,capability=90", resident),
        Scenario::new("keeps a cache on the device", "seed=75,capability=90", cache),
    ];
    for (index, (claim, check)) in claims.filter(|(_, (claim, _))| !has(claim, &["in a fixed order"])) {
        let capability = if has(claim, &["case in f16", "carries a running state"]) { 80 } else { 90 };
        let run = move || pollster::block_on(check(&CudaBackend::new(0).unwrap(), "fake cuda"));
        let mut scenario = Scenario::new(claim, &format!("seed={},capability={capability}", index + 1), run);
        if has(claim, &["case in f16", "case in bf16", "carries", "all-to-all"]) {
            scenario.says = &["launched decode_", "launched hopper_"];
            if capability < 90 {
                scenario.says = &["launched decode_", "launched attend_"];
                scenario.says_not = &["launched hopper_"];
            }
        }
        if has(claim, &["converts as", "encodes int8"]) {
            let mut older = scenario.clone();
            older.name += ", before Hopper";
            older.fake = format!("seed={},capability=80", index + 31);
            all.push(older);
        }
        all.push(scenario);
    }
    all.push(Scenario::new("sums bf16 in a fixed order to the same bytes on any mesh", "seed=20", || {
        let mask = OracleMask::causal().and(OracleTerm::Window { left: 600, right: 0 });
        let prepared = Prepared::new(case("1088 tokens in a window", 1088, mask, |_| {}), Dtype::Bf16);
        pollster::block_on(fixed(&CudaBackend::new(0).unwrap(), &prepared, &UNEVEN, "fake cuda"));
    }));
    all
}
