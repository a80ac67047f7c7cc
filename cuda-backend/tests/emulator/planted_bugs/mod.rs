//! Planted bugs: the source of a kernel is changed in one place, and the tests must fail. This
//! shows that the tests can find such bugs.

mod backward;
mod bias;
mod convert;
mod decode;
mod hopper;
mod hopper_backward;
mod tiles;

use std::path::{Path, PathBuf};

use half::bf16;
use kyklos::Dtype;
use kyklos_fake_cuda::cxx;
use kyklos_oracle::inputs::{Case, cases};

use crate::amount::amount;
use crate::call::{Call, Kernel, Keys};
use crate::job::Timing;
use crate::parallel::in_parallel;
use crate::program::Program;

/// A change of one place in a file of `kernels/`: `from` occurs once and is replaced by `into`.
struct Bug {
    what: &'static str,
    file: &'static str,
    from: &'static str,
    into: &'static str,
}

const fn bug(what: &'static str, file: &'static str, from: &'static str, into: &'static str) -> Bug {
    Bug { what, file, from, into }
}

impl Bug {
    /// The text of its file with the change.
    fn planted_in(&self, text: &str) -> String {
        assert_eq!(text.matches(self.from).count(), 1, "{}: `{}` in {}", self.what, self.from, self.file);
        text.replace(self.from, self.into)
    }
}

type Judge = Box<dyn Fn(&Program, Timing) -> Result<(), String> + Sync>;

/// A kernel with planted bugs.
struct Planted {
    name: &'static str,
    /// The source that is compiled with the changed headers: one instance of the kernel.
    instance: &'static str,
    bugs: &'static [Bug],
    /// Small calls that together cover the kernel, with one schedule of the emulator. Returns the
    /// first thing that is wrong.
    judge: Judge,
}

impl Planted {
    /// An attention kernel.
    fn attending(
        name: &'static str,
        instance: &'static str,
        bugs: &'static [Bug],
        calls: Vec<(Call, Kernel, Keys)>,
    ) -> Self {
        let judge = move |program: &Program, timing| {
            calls
                .iter()
                .try_for_each(|(call, with, keys)| call.judge(program, *with, *keys, timing).map(|_| ()))
        };
        Self { name, instance, bugs, judge: Box::new(judge) }
    }
}

/// The emulator with changed kernels.
fn planted(kernel: &Planted, bugs: &[&Bug], name: &str) -> Program {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("planted").join(kernel.name).join(name);
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    for path in cxx::files_in(&kernels) {
        let file = path.strip_prefix(&kernels).unwrap();
        // The instructions are the emulator's.
        if file.starts_with("cuda") || file.extension().is_none_or(|extension| extension != "h") {
            continue;
        }
        let mut text = std::fs::read_to_string(&path).unwrap();
        for bug in bugs.iter().filter(|bug| Path::new(bug.file) == file) {
            text = bug.planted_in(&text);
        }
        let changed = folder.join(file);
        std::fs::create_dir_all(changed.parent().unwrap()).unwrap();
        write_if_new(&changed, &text);
    }
    let instance: PathBuf = folder.join("instance.cu");
    write_if_new(&instance, kernel.instance);
    // Every job of the unchanged kernels takes a few seconds.
    Program::build(&folder, &[instance]).limited(60)
}

fn write_if_new(path: &Path, text: &str) {
    if std::fs::read_to_string(path).ok().as_deref() != Some(text) {
        std::fs::write(path, text).unwrap();
    }
}

/// A small call of three query heads over one KV head.
fn call(change: impl FnOnce(&mut Case)) -> Call {
    Call::new::<bf16>(case(change), Dtype::Bf16)
}

fn case(change: impl FnOnce(&mut Case)) -> Case {
    let mut case = cases().into_iter().find(|case| case.name == "one row beyond a tile").unwrap();
    (case.problem.q_heads, case.problem.kv_heads) = (3, 1);
    change(&mut case);
    case
}

/// The first thing that is wrong with a program, over all schedules.
fn found(program: &Program, kernel: &Planted) -> Option<String> {
    Timing::ALL.into_iter().map(|timing| (kernel.judge)(program, timing)).find_map(Result::err)
}

fn of_the_forward_pass() -> [Planted; 6] {
    [
        tiles::kernel(),
        decode::kernel(),
        decode::in_f32(),
        hopper::kernel(),
        convert::types(),
        convert::codes(),
    ]
}

fn of_the_backward_pass() -> [Planted; 4] {
    [backward::small(), backward::wide(), backward::in_f32(), backward::tiles()]
}

fn of_the_backward_pass_on_hopper() -> [Planted; 1] {
    [hopper_backward::kernels()]
}

fn of_the_gradient_of_a_bias() -> [Planted; 2] {
    [bias::in_f32(), bias::tiles()]
}

#[test]
fn every_planted_bug_has_its_place() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let backward = of_the_backward_pass().into_iter().chain(of_the_backward_pass_on_hopper());
    for kernel in of_the_forward_pass().into_iter().chain(backward).chain(of_the_gradient_of_a_bias()) {
        for bug in kernel.bugs {
            bug.planted_in(&std::fs::read_to_string(sources.join(bug.file)).unwrap());
        }
    }
}

#[test]
fn every_planted_bug_is_found() {
    every_bug_is_found(&of_the_forward_pass());
}

#[test]
#[ignore = "58 builds of kernels take three minutes of two cores: scripts/test-all.sh"]
fn every_planted_bug_of_the_backward_pass_is_found() {
    every_bug_is_found(&of_the_backward_pass());
}

#[test]
#[ignore = "60 builds of kernels take three minutes of a core: scripts/test-all.sh"]
fn every_planted_bug_of_the_backward_pass_on_hopper_is_found() {
    every_bug_is_found(&of_the_backward_pass_on_hopper());
}

#[test]
#[ignore = "22 builds of kernels take two minutes of two cores: scripts/test-all.sh"]
fn every_planted_bug_of_the_gradient_of_a_bias_is_found() {
    every_bug_is_found(&of_the_gradient_of_a_bias());
}

fn every_bug_is_found(kernels: &[Planted]) {
    // In a sample every fourth one is built: a build takes seconds.
    let step = amount(4, 1);
    let chosen = |kernel: &Planted| (0..kernel.bugs.len()).step_by(step).chain([kernel.bugs.len()]);
    let all: Vec<_> = kernels.iter().flat_map(|kernel| chosen(kernel).map(move |n| (kernel, n))).collect();
    let wrong = in_parallel(all.len(), |n| {
        let (kernel, n) = all[n];
        // The last one is the unchanged kernel, which must pass.
        let bug = kernel.bugs.get(n);
        let program = planted(kernel, &Vec::from_iter(bug), &n.to_string());
        match (bug, found(&program, kernel)) {
            (Some(bug), None) => Some(format!("{}: not found: {}", kernel.name, bug.what)),
            (None, Some(words)) => Some(format!("{} as it is: {words}", kernel.name)),
            _ => None,
        }
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
