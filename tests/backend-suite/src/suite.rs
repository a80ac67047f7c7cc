//! The suite as a test program.

use kyklos::backend::{Backend, Device, Threaded};
use kyklos::{Error, Result};
use libtest_mimic::{Arguments, Failed, Trial};

use crate::conformance::checks;
use crate::resident::{caches_stay_on_the_device, layers_stay_on_the_device};

/// Checks every claim on one backend, and ends the process: the `main` of a test with `harness =
/// false`. The exit code is 0 if all claims hold. `open` opens the device; each claim gets one of
/// its own. The arguments of the process are those of `cargo test`: words of a claim, `--list`,
/// `--exact`, `--test-threads`.
pub fn run<B: Backend + Threaded + 'static>(
    name: &str,
    open: impl Fn() -> Result<B> + Clone + Send + 'static,
) -> !
where
    B::Buffer: Threaded + 'static,
{
    Suite::new().backend(name, open).run()
}

/// The suite on several backends or devices, as one test program. [`run`] is the short form for
/// one.
#[derive(Debug, Default)]
#[must_use = "nothing is checked before `run`"]
pub struct Suite {
    trials: Vec<Trial>,
}

impl Suite {
    /// No backend yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds every claim on the devices that `open` opens. The claims are reported as `NAME: CLAIM`.
    pub fn backend<B: Backend + Threaded + 'static>(
        self,
        name: &str,
        open: impl Fn() -> Result<B> + Clone + Send + 'static,
    ) -> Self
    where
        B::Buffer: Threaded + 'static,
    {
        self.claims(name, &[""], open)
    }

    /// As [`Self::backend`], with only those claims that contain one of `words`.
    pub fn claims<B: Backend + Threaded + 'static>(
        mut self,
        name: &str,
        words: &[&str],
        open: impl Fn() -> Result<B> + Clone + Send + 'static,
    ) -> Self
    where
        B::Buffer: Threaded + 'static,
    {
        let opened = |result: Result<B>| result.map_err(|error: Error| Failed::from(error.to_string()));
        let is_wanted = |claim: &str| words.iter().any(|word| claim.contains(word));
        for (claim, check) in checks::<B>().into_iter().filter(|(claim, _)| is_wanted(claim)) {
            let (open, who) = (open.clone(), name.to_owned());
            self.trials.push(Trial::test(format!("{name}: {claim}"), move || {
                pollster::block_on(check(&opened(open())?, &who));
                Ok(())
            }));
        }
        if is_wanted(CACHED) {
            let open = open.clone();
            self.trials.push(Trial::test(format!("{name}: {CACHED}"), move || {
                caches_stay_on_the_device(opened(open())?);
                Ok(())
            }));
        }
        if is_wanted(RESIDENT) {
            self.trials.push(Trial::test(format!("{name}: {RESIDENT}"), move || {
                layers_stay_on_the_device(opened(open())?, LAYERS);
                Ok(())
            }));
        }
        self
    }

    /// Reports every claim as ignored, with the reason, because the machine has no such device; as
    /// failed if the device `is_required`.
    pub fn absent(mut self, name: &str, reason: &str, is_required: bool) -> Self {
        let claims = checks::<Device>().into_iter().map(|(claim, _)| claim);
        self.trials.extend(claims.chain([CACHED, RESIDENT]).map(|claim| {
            let why = reason.to_owned();
            Trial::test(format!("{name}: {claim} [{reason}]"), move || Err(Failed::from(why)))
                .with_ignored_flag(!is_required)
        }));
        self
    }

    /// Checks the claims that the arguments of the process choose, and ends the process. The exit
    /// code is 0 if all of them hold.
    pub fn run(self) -> ! {
        libtest_mimic::run(&Arguments::from_args(), self.trials).exit()
    }
}

/// The claims that need several threads.
const CACHED: &str = "keeps a cache on the device";
const RESIDENT: &str = "keeps forty layers on the device";
const LAYERS: usize = 40;
